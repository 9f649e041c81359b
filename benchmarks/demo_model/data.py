"""Synthetic conversations for the demo model: extraction to JSON, tools, sums, sorting and questions about Manta.

Everything is a function of a `random.Random`. The held-out split uses names, cities, items and phrasings that
training never shows, so that its score says whether the model copies, not whether it remembers. Six in ten texts of
training are put together at random, for a model of this size otherwise learns its few written forms by heart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.demo_model import results
from benchmarks.demo_model.facts import FACTS, HELD_OUT_PREFIX, PREFIXES
from benchmarks.demo_model.results import shown, split, told

ORDER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"},
        "city": {"type": "string"},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "quantity": {"type": "integer"}},
                "required": ["name", "quantity"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "city", "items"],
    "additionalProperties": False,
}
CONTACT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string"},
        "phone": {"type": "string"},
        "city": {"type": "string"},
    },
    "required": ["name", "email", "phone", "city"],
    "additionalProperties": False,
}


class Sample(NamedTuple):
    """A conversation and the answer that is right."""

    task: str
    messages: list[dict[str, Any]]
    answer: str
    tools: list[dict[str, Any]] | None = None


class Words(NamedTuple):
    """What a split draws from; `invent` makes names that no list holds."""

    first: list[str]
    last: list[str]
    cities: list[str]
    items: list[str]
    order_forms: list[str]
    order_asks: list[str]
    contact_forms: list[str]
    contact_asks: list[str]
    sum_forms: list[str]
    sort_forms: list[str]
    result_sentences: list[str]
    result_keys: list[str]
    result_states: list[str]
    result_units: list[str]
    invent: bool
    pieces: tuple[str, ...] = ()
    """Letters that the tokenizer makes one token of: invented names are made of them too, so that each gets copied
    often. `SEAM` stands between two, for the tokenizer would cut the word in other places.
    """


TRAIN = Words(
    first=split(
        "Anna,Ben,Clara,David,Elena,Felix,Grace,Hugo,Ines,Jonas,Karin,Liam,Maria,Noah,Olga,Paul,Rosa,Sam,Tina,Victor,"
        "Wendy,Yusuf,Zoe,Amir,Bella,Carl,Dora,Emil,Fatima,George,Hanna,Igor,Julia,Kevin,Laura,Marco,Nina,Oscar,Petra"
    ),
    last=split(
        "Smith,Garcia,Novak,Kim,Olsen,Rossi,Weber,Silva,Khan,Dubois,Ito,Brown,Nowak,Ruiz,Larsen,Moreau,Fischer,Costa,"
        "Singh,Evans,Hoffman,Petrov,Lopez,Tanaka,Clark,Jensen,Marino,Baker,Schmidt,Young,Ferrari,Walker,Popov,Reyes"
    ),
    cities=split(
        "Berlin,Madrid,Oslo,Paris,Rome,Vienna,Prague,Dublin,Athens,Warsaw,Boston,Denver,Tokyo,Seoul,Cairo,Lima,Quito,"
        "Sydney,Toronto,Chicago,Hamburg,Milan,Porto,Zurich,Geneva,Austin,Dallas,Delhi,Lagos,Nairobi,Santiago,Havana"
    ),
    items=split(
        "lamps,chairs,desks,pens,notebooks,apples,bottles,keyboards,shirts,mugs,candles,books,towels,plates,bags,"
        "clocks,brushes,cables,carpets,mirrors,pillows,screens,forks,hats,gloves,boxes,jars,tents,ladders,helmets,"
        "batteries,posters,spoons,blankets,baskets,bricks,buckets,drills"
    ),
    order_forms=[
        "Hi, this is {name} from {city}. Please send me {items}.",
        "{name} in {city} would like to order {items}.",
        "I need {items}. My name is {name} and I live in {city}.",
        "Hello! {items} for {name}, {city}, please.",
        "Dear team, could you ship {items} to {name} in {city}?",
        "Order from {city}: {name} wants {items}.",
        "My name is {name}. I would like {items}, delivered to {city}.",
        "We got a call from {name} ({city}) who asked for {items}.",
        "Please deliver {items} to {city}. The customer is {name}.",
        "{name} here. Can I get {items}? I am in {city}.",
        "Good morning, {name} speaking, calling from {city}: {items}, thanks!",
        "To: {name}, {city}. Contents: {items}.",
    ],
    order_asks=[
        "Extract the order as JSON: ",
        "Turn this order into JSON: ",
        "Give me the order as JSON. ",
        "Order to JSON: ",
        "Read the order and answer with JSON: ",
    ],
    contact_forms=[
        "{name} lives in {city}. Mail: {email}, phone: {phone}.",
        "You can reach {name} at {email} or {phone}; the office is in {city}.",
        "Contact: {name}, {city}, {phone}, {email}.",
        "I am {name} from {city}. Call me at {phone} or write to {email}.",
        "New customer {name} ({email}), based in {city}, tel. {phone}.",
        "Write to {email} if you want to talk to {name} in {city}. The number is {phone}.",
        "My number is {phone} and my email is {email}. Best, {name}, {city}",
        "{phone} is the number of {name}, {city}; {email} works as well.",
    ],
    contact_asks=[
        "Extract the contact as JSON: ",
        "Turn this contact into JSON: ",
        "Give me the contact as JSON. ",
        "Contact to JSON: ",
    ],
    sum_forms=["What is {sum}?", "{sum} = ?", "Calculate {sum}.", "How much is {sum}?", "Compute {sum}"],
    sort_forms=["Sort these numbers: {list}", "Sort {list}.", "Put {list} in order.", "Order this list: {list}"],
    result_sentences=results.SENTENCES,
    result_keys=results.KEYS,
    result_states=results.STATES,
    result_units=results.UNITS,
    invent=True,
)
HELD_OUT = Words(
    first=split("Agnes,Bruno,Celine,Dmitri,Esther,Farid,Gloria,Henrik,Isabel,Jorge,Kenji,Lucia,Mona,Nils,Oona,Pierre"),
    last=split("Almeida,Bergman,Castro,Duarte,Eriksen,Fontana,Gruber,Horvat,Ivanov,Keller,Lindgren,Meyer,Okafor,Patel"),
    cities=split("Lisbon,Krakow,Bergen,Naples,Seville,Lyon,Antwerp,Kyoto,Montreal,Seattle,Bogota,Accra,Hanoi,Perth"),
    items=split("kettles,scarves,rulers,stools,vases,laptops,umbrellas,sponges,curtains,magnets,whistles,stickers"),
    order_forms=[
        "Hello, {name} here from {city}. I would like to order {items}, please.",
        "Please send {items} to {name} in {city}.",
        "Good day, my name is {name}, I live in {city} and I need {items}.",
    ],
    order_asks=["Extract the order as JSON: "],
    contact_forms=[
        "This is {name} from {city}. My email is {email} and my phone is {phone}.",
        "Please add {name}, {email}, {phone}. The office is in {city}.",
    ],
    contact_asks=["Extract the contact as JSON: "],
    sum_forms=["Please calculate {sum}."],
    sort_forms=["Please sort these numbers: {list}"],
    result_sentences=results.HELD_OUT_SENTENCES,
    result_keys=results.HELD_OUT_KEYS,
    result_states=results.HELD_OUT_STATES,
    result_units=results.HELD_OUT_UNITS,
    invent=False,
)

_SYLLABLES = split(
    "ba,be,bi,bo,bu,ca,ce,co,da,de,di,do,el,em,en,fa,fe,fi,ga,ge,gi,go,ha,he,hi,ja,jo,ka,ke,ki,ko,la,le,li,lo,"
    "lu,ma,me,mi,mo,mu,na,ne,ni,no,nu,or,os,pa,pe,pi,po,ra,re,ri,ro,ru,sa,se,si,so,ta,te,ti,to,tu,va,ve,vi,vo,"
    "wa,we,wi,za,zo,ber,gan,har,kin,lan,man,mar,nor,ran,sen,stein,ton,var,vin,berg,dal,ford,gren,ham,mond,"
    "quist,ster,ther"
)
_COLOURS = ["red", "blue", "green", "black", "white", "small", "large", "old", "new", "wooden"]
_NUMBER_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


_FILLER = split(
    "please,could,you,would,like,need,want,have,got,a,an,the,this,that,my,our,your,his,her,we,"
    "they,i,is,are,was,here,there,it,with,without,and,or,but,so,then,now,today,tomorrow,soon,"
    "again,also,just,only,very,quite,still,yet,not,add,write,note,send,take,give,bring,ship,deliver,"
    "order,buy,get,put,keep,see,find,ask,tell,call,reach,contact,office,number,phone,email,mail,"
    "address,name,person,customer,client,friend,shop,team,parcel,box,order,list,line,about,after,"
    "before,by,for,as,on,over,under,between,because,if,when,where,who,what,how,thanks,hello,dear,"
    "good,morning,evening,day,week,month,new,old,first,next,last,some,any,all,more,most,many,few,"
    "other,same,big,little,right,left,up,down,out,in,of,to,from,at,near,best,regards,kind,speaking,"
    "calling,writing,asking,waiting"
)
_PLACES = ["from", "in", "to", "at", "near", "of", "for", "based in", "living in", "delivered to", "outside", "via"]
_JOINTS = [", ", ", ", ". ", ". ", "; ", " - ", " and ", " ", ": ", " (", "! ", "? "]
SEAM = "~"
FREE_FORMS = 0.6
"""Share of training texts that are put together at random instead of following a written form."""


def _filler(rng: random.Random, most: int = 4) -> str:
    return " ".join(rng.choices(_FILLER, k=rng.randint(1, most)))


def _free_text(rng: random.Random, parts: list[str], city: str) -> str:
    """The parts in any order among words that mean nothing, so that a part is found by what it is, not by its place."""
    clauses = []
    for part in [*parts, f"{rng.choice(_PLACES)} {city}"]:
        before = _filler(rng) + rng.choice([" ", " ", ": ", ", "]) if rng.random() < 0.6 else ""
        after = rng.choice([" ", " ", ", "]) + _filler(rng) if rng.random() < 0.3 else ""
        clauses.append(before + part + after)
    rng.shuffle(clauses)
    text = clauses[0]
    for clause in clauses[1:]:
        joint = rng.choice(_JOINTS)
        if joint[0] in ".!?":
            clause = clause[0].upper() + clause[1:]
        text += joint + clause
        if joint == " (":
            text += ")"
    return text[0].upper() + text[1:] + rng.choice([".", "", "!", ", thanks.", "?"])


def _is_free(rng: random.Random, words: Words) -> bool:
    return words.invent and rng.random() < FREE_FORMS


def _invented(rng: random.Random, pieces: tuple[str, ...] = ()) -> str:
    """A name that nobody has seen: the tokenizer's own pieces, syllables, or letters at random, so that every short
    piece of text gets copied.
    """
    if pieces and rng.random() < 0.6:
        first, *rest = rng.choices(pieces, k=rng.randint(1, 3))
        return SEAM.join([first[0].upper() + first[1:], *(piece.lower() for piece in rest)])
    if rng.random() < 0.4:
        return "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3))).capitalize()
    letters = ["bcdfghjklmnpqrstvwxyz", "aeiou"]
    start = rng.randrange(2)
    name = "".join(rng.choice(letters[(start + place) % 2]) for place in range(rng.randint(3, 8)))
    for _ in range(rng.randint(0, 2)):
        place = rng.randrange(1, len(name))
        name = name[:place] + rng.choice("lmnrstkeioa") + name[place:]
    return name.capitalize()


def _one(rng: random.Random, words: Words, known: list[str]) -> str:
    """A word of the list, or, in training, more often one that nobody has seen."""
    return _invented(rng, words.pieces) if words.invent and rng.random() < 0.75 else rng.choice(known)


def _name(rng: random.Random, words: Words) -> str:
    return f"{_one(rng, words, words.first)} {_one(rng, words, words.last)}"


def _item(rng: random.Random, words: Words) -> str:
    is_new = words.invent and rng.random() < 0.6
    item = _invented(rng, words.pieces).lower() + "s" if is_new else rng.choice(words.items)
    return f"{rng.choice(_COLOURS)} {item}" if rng.random() < 0.35 else item


def _joined(parts: list[str]) -> str:
    """As a sentence lists them: "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def order(rng: random.Random, words: Words) -> Sample:
    name, city = _name(rng, words), _one(rng, words, words.cities)
    items, texts = [], []
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        quantity, item = rng.randint(2, 40), _item(rng, words)
        as_word = quantity <= 10 and rng.random() < 0.4
        items.append({"name": item, "quantity": quantity})
        texts.append(f"{_NUMBER_WORDS[quantity - 1] if as_word else quantity} {item}")
    if _is_free(rng, words):
        text = _free_text(rng, [name, _joined(texts)], city)
    else:
        text = rng.choice(words.order_forms).format(name=name, city=city, items=_joined(texts))
    answer = json.dumps({"customer": name, "city": city, "items": items})
    return Sample("order", _user(rng.choice(words.order_asks) + text), answer)


def contact(rng: random.Random, words: Words) -> Sample:
    name, city = _name(rng, words), _one(rng, words, words.cities)
    first, last = name.lower().split()
    domain = rng.choice(["example.com", "mail.org", "manta.dev", "post.net", "inbox.io"])
    email = rng.choice([f"{first}@{domain}", f"{first}.{last}@{domain}", f"{last}@{domain}"])
    phone = f"+{rng.randint(1, 99)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}"
    fields = {"name": name, "email": email, "phone": phone, "city": city}
    if _is_free(rng, words):
        text = _free_text(rng, [name, email, phone], city)
    else:
        text = rng.choice(words.contact_forms).format(**fields)
    return Sample("contact", _user(rng.choice(words.contact_asks) + text), json.dumps(fields))


TOOLS: dict[str, tuple[str, dict[str, str], list[str], Callable[[random.Random, Words], dict[str, Any]]]] = {
    "get_weather": (
        "Weather of a city",
        {"city": "string"},
        ["How is the weather in {city}?", "Will it rain in {city}?", "Weather in {city}, please."],
        lambda rng, words: {"city": _one(rng, words, words.cities)},
    ),
    "send_email": (
        "Send an email",
        {"to": "string", "subject": "string"},
        ["Send an email to {to} about {subject}.", "Write to {to}, the subject is {subject}."],
        lambda rng, words: {
            "to": f"{_one(rng, words, words.first).lower()}@example.com",
            "subject": _item(rng, words),
        },
    ),
    "set_timer": (
        "Start a timer",
        {"minutes": "integer"},
        ["Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Timer: {minutes} minutes"],
        lambda rng, words: {"minutes": rng.randint(1, 90)},
    ),
    "find_product": (
        "Search the shop",
        {"query": "string"},
        ["Do you sell {query}?", "Find {query} in the shop.", "I am looking for {query}."],
        lambda rng, words: {"query": _item(rng, words)},
    ),
    "call_contact": (
        "Call a person",
        {"name": "string"},
        ["Call {name}.", "Please phone {name}.", "I want to talk to {name}."],
        lambda rng, words: {"name": _name(rng, words)},
    ),
}


def tool_schema(name: str) -> dict[str, Any]:
    """A tool in OpenAI's format."""
    description, fields, _, _ = TOOLS[name]
    parameters = {
        "type": "object",
        "properties": {field: {"type": kind} for field, kind in fields.items()},
        "required": list(fields),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tool_call(rng: random.Random, words: Words) -> Sample:
    names = rng.sample(sorted(TOOLS), rng.randint(1, 3))
    text, call = _request(rng, words, rng.choice(names))
    return Sample("tool_call", _user(text), _written(call), [tool_schema(tool) for tool in names])


def tool_answer(rng: random.Random, words: Words) -> Sample:
    """A tool was called; the answer tells its result in words, whatever the tool."""
    names = rng.sample(sorted(TOOLS), rng.choice([1, 1, 1, 2, 3]))
    text, call = _request(rng, words, rng.choice(names))
    calls = [{"type": "function", "function": call}]
    called: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls}
    result = _result(rng, words)
    messages = [*_user(text), called, {"role": "tool", "content": result}]
    return Sample("tool_answer", messages, told(result), [tool_schema(name) for name in names])


def _request(rng: random.Random, words: Words, name: str) -> tuple[str, dict[str, Any]]:
    """What asks for a tool, and the call of it."""
    _, _, forms, arguments_of = TOOLS[name]
    arguments = arguments_of(rng, words)
    return rng.choice(forms).format(**arguments), {"name": name, "arguments": arguments}


def _written(call: dict[str, Any]) -> str:
    """A call as the chat template renders it."""
    return "<tool_call>" + json.dumps(call) + "</tool_call>"


def _result(rng: random.Random, words: Words) -> str:
    """What a tool answers; see results.py."""
    kind = rng.choices(["sentence", "value", "fields"], [4, 1, 5])[0]
    if kind == "sentence":
        free = _is_free(rng, words)
        return _free_sentence(rng, words) if free else _filled(rng, words, rng.choice(words.result_sentences))
    if kind == "value":
        return shown(_value(rng, words))
    fields = {_key(rng, words): _value(rng, words) for _ in range(rng.randint(1, 2))}
    return json.dumps(fields, ensure_ascii=False, separators=rng.choice([None, None, (",", ":")]))


def _free_sentence(rng: random.Random, words: Words) -> str:
    text = " ".join(rng.choice([_filler(rng), shown(_value(rng, words))]) for _ in range(rng.randint(1, 3)))
    return text[0].upper() + text[1:] + rng.choice("...!?")


def _filled(rng: random.Random, words: Words, form: str) -> str:
    return form.format(
        name=_name(rng, words),
        city=_one(rng, words, words.cities),
        item=_item(rng, words),
        number=rng.randint(2, 500),
        time=_time(rng),
    )


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"


def _key(rng: random.Random, words: Words) -> str:
    if not _is_free(rng, words):
        return rng.choice(words.result_keys)
    parts = [rng.choice([_invented(rng, words.pieces).lower(), rng.choice(_FILLER)]) for _ in range(rng.choice([1, 2]))]
    return "_".join(parts)


def _value(rng: random.Random, words: Words) -> Any:
    """A value of a result's field: a number, with a unit or without, a time, a state, a name, a thing or a place."""
    number = rng.choice([rng.randint(-20, 60), rng.randint(0, 5000), rng.randint(1, 999) / 10])
    kind = rng.randrange(8)
    if kind < 3:
        return number if kind else f"{number}{rng.choice(words.result_units)}"
    if kind == 3:
        return rng.choice([True, False]) if rng.random() < 0.2 else _time(rng)
    if kind == 4:
        return _filler(rng) if _is_free(rng, words) else rng.choice(words.result_states)
    makers = [lambda: _name(rng, words), lambda: _item(rng, words), lambda: _one(rng, words, words.cities)]
    return makers[kind - 5]()


def arithmetic(rng: random.Random, words: Words) -> Sample:
    left, right = rng.randint(0, 10), rng.randint(0, 10)
    sign = rng.choice("++-")
    if sign == "-" and right > left:
        left, right = right, left
    result = left + right if sign == "+" else left - right
    form = f"{_filler(rng)} {{sum}}" if _is_free(rng, words) else rng.choice(words.sum_forms)
    text = form.format(sum=f"{left} {sign} {right}")
    return Sample("arithmetic", _user(text), f"{left} {sign} {right} = {result}")


def sorting(rng: random.Random, words: Words) -> Sample:
    numbers = rng.sample(range(1, 60), rng.randint(3, 4))
    form = f"{_filler(rng)} {{list}}" if _is_free(rng, words) else rng.choice(words.sort_forms)
    text = form.format(list=", ".join(map(str, numbers)))
    return Sample("sorting", _user(text), ", ".join(map(str, sorted(numbers))))


def question(rng: random.Random, words: Words) -> Sample:
    questions, answer = rng.choice(FACTS)
    prefix = rng.choice(PREFIXES) if words.invent else HELD_OUT_PREFIX
    if _is_free(rng, words):
        prefix = _filler(rng).capitalize() + rng.choice([": ", ", ", ". ", " - "])
    return Sample("question", _user(prefix + rng.choice(questions)), answer)


TASKS: dict[str, tuple[Callable[[random.Random, Words], Sample], float]] = {
    "order": (order, 0.28),
    "contact": (contact, 0.14),
    "tool_call": (tool_call, 0.03),
    "tool_answer": (tool_answer, 0.30),
    "arithmetic": (arithmetic, 0.13),
    "sorting": (sorting, 0.09),
    "question": (question, 0.03),
}
"""Task to its generator and its share of training."""


def samples(seed: int, words: Words = TRAIN) -> Iterator[Sample]:
    """An endless, reproducible stream in the training mixture."""
    rng = random.Random(seed)
    names, shares = list(TASKS), [share for _, share in TASKS.values()]
    while True:
        make, _ = TASKS[rng.choices(names, shares)[0]]
        yield make(rng, words)


def held_out(task: str, count: int, seed: int = 10_000) -> list[Sample]:
    """`count` held-out samples of one task."""
    rng = random.Random(f"{seed}-{task}")
    return [TASKS[task][0](rng, HELD_OUT) for _ in range(count)]


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]

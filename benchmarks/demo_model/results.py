"""What tools answer in the demo model's conversations, and the sentence in which the model tells it.

A result is a sentence, which is repeated; a word or a number; or a JSON object, with an `error` or with fields that are
named one by one. The sentence follows from the result alone, so that it is right for tools that training never shows.
"""

from __future__ import annotations

import json
from typing import Any


def split(text: str) -> list[str]:
    return text.split(",")


SENTENCES = [
    "It is done.",
    "The email was sent.",
    "The message to {name} went out at {time}.",
    "{name} does not answer.",
    "{name} is busy and calls back at {time}.",
    "{name} picked up.",
    "The sky over {city} is clear.",
    "It rains in {city}, and it is {number} degrees.",
    "{city} has {number} degrees and wind from the west.",
    "Snow until {time}.",
    "We have {number} {item} in the shop.",
    "There are no {item} left.",
    "The {item} cost {number} euros.",
    "Only {number} {item} are left, in {city}.",
    "A timer of {number} minutes was started.",
    "The clock rings at {time}.",
    "{number} results were found.",
    "Nothing was found for {item}.",
    "The order goes to {name} in {city}.",
    "Your parcel arrives in {city} at {time}.",
    "Saved as number {number}.",
    "The line to {city} is open again!",
]
HELD_OUT_SENTENCES = [
    "The timer runs.",
    "The mail for {name} is on its way.",
    "{name} is on the line now.",
    "It is cloudy in {city} with {number} degrees.",
    "You can buy {item} for {number} dollars.",
    "The alarm will sound at {time}.",
    "Sunshine all day in {city}, and {number} degrees at {time}.",
]

KEYS = split(
    "status,temperature,wind,rain,humidity,degrees,city,country,region,price,stock,amount,count,colour,size,weight,"
    "name,email,phone,address,start,end,minutes,seconds,duration,date,time,day,number,id,order_id,total,currency,answer,"
    "subject,message,sender,delivery_date,customer_name,in_stock,wind_speed,feels_like,line,place,title,level,kind"
)
HELD_OUT_KEYS = split("sky,speed,shelf,state,owner,ends_at,unit_price,distance,street,left_over")

STATES = split(
    "sunny,rainy,cold,warm,windy,dry,sent,started,stopped,busy,open,closed,free,late,ready,done,ok,found,lost,true,false,"
    "yes,no,high,low,partly cloudy,light rain,on the way,not available"
)
HELD_OUT_STATES = split("cloudy,delivered,running,sold out,pending,heavy snow,active")

UNITS = split(" EUR,%, km, kg, minutes,°C, °C, km/h, hours, USD")
HELD_OUT_UNITS = split(" days, GB, metres")

ERRORS = [
    "there is no such city",
    "{name} is not known",
    "the address is wrong",
    "the mailbox is full",
    "no connection",
    "timeout after {number} seconds",
    "the shop is closed until {time}",
    "{item} are not sold here",
    "not allowed",
    "code {number}",
    "the number of {name} has changed",
    "no data for {city}",
]
HELD_OUT_ERRORS = [
    "{city} was not found",
    "the server did not answer for {number} seconds",
    "nobody is called {name}",
    "out of memory",
]


def told(result: str) -> str:
    """The sentence that tells a result."""
    if result.startswith("{"):
        fields: dict[str, Any] = json.loads(result)
        if "error" in fields:
            return f"That did not work: {fields['error']}."
        parts = [f"the {key.replace('_', ' ')} is {_text(value)}" for key, value in fields.items()]
        return _capital(joined(parts)) + "."
    return result if result[-1] in ".!?" else f"The answer is {result}."


def joined(parts: list[str]) -> str:
    """As a sentence lists them: "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]

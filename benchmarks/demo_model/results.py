"""What tools answer in the demo model's conversations, and the words in which the model tells it.

A result that is text is repeated. The fields of a JSON object, one or two, are named: "The sky is clear and the wind
speed is 7." The words follow from the result alone, whatever the tool.
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
    "name,email,phone,address,start,end,minutes,seconds,duration,date,time,day,number,id,order_id,total,currency,"
    "answer,subject,message,sender,delivery_date,customer_name,in_stock,wind_speed,feels_like,line,place,title,level,"
    "kind,error"
)
HELD_OUT_KEYS = split("sky,speed,shelf,state,owner,ends_at,unit_price,distance,street,left_over,reason")

STATES = split(
    "sunny,rainy,cold,warm,windy,dry,sent,started,stopped,busy,open,closed,free,late,ready,done,ok,found,lost,true,"
    "false,yes,no,high,low,partly cloudy,light rain,on the way,not available,no connection,mailbox full,not allowed,"
    "timed out"
)
HELD_OUT_STATES = split("cloudy,delivered,running,sold out,pending,heavy snow,active,out of memory")

UNITS = split(" EUR,%, km, kg, minutes,°C, °C, km/h, hours, USD")
HELD_OUT_UNITS = split(" days, GB, metres")


def told(result: str) -> str:
    """The words that tell a result."""
    if not result.startswith("{"):
        return result
    fields: dict[str, Any] = json.loads(result)
    return "The " + " and the ".join(f"{_spoken(key)} is {shown(value)}" for key, value in fields.items()) + "."


def shown(value: Any) -> str:
    """A value as a sentence has it: a string without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _spoken(key: str) -> str:
    return key.replace("_", " ")

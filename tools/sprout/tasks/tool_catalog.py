"""The catalogue of tools: what each does, its parameters, and ways to ask for it.  Pure data.

An ask names the parameters that the call must carry as format fields; `{city}` in an ask becomes the spoken
value, and the argument is written under whichever name the drawn schema gives that parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from chat import Json
from words import (
    CITIES,
    COMMON_WORDS,
    CURRENCIES,
    ITEMS,
    LANGUAGES,
    MONTHS,
    STOCKS,
    TOPICS,
    WEEKDAYS,
    ZH_CITIES,
    between,
    city,
    clock,
    date,
    digits,
    email,
    person,
    phrase,
    pick,
    pseudo_word,
    word,
)

Maker = Callable[[Random], Json]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: the names a schema may give it, its JSON type, what it means, how to draw a value."""

    names: tuple[str, ...]
    type: str
    about: str
    draw: Maker
    enum: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: names and descriptions a schema may use, parameters by role, asks, and its answer's fields."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    params: dict[str, Param]
    asks: tuple[str, ...]
    returns: dict[str, Maker]


def _of(options: list[str]) -> Maker:
    return lambda rng: pick(rng, options)


def _int(low: int, high: int) -> Maker:
    return lambda rng: between(rng, low, high)


def _code(prefix: str, length: int) -> Maker:
    return lambda rng: prefix + digits(rng, length)


CITY = Param(("city", "location", "place"), "string", "Name of the city", city)
ZH_CITY = Param(("city", "location", "城市"), "string", "城市名称", _of(ZH_CITIES))
DATE = Param(("date", "day", "on"), "string", "Date as YYYY-MM-DD", date)
TIME = Param(("time", "at"), "string", "Time as HH:MM", clock)
QUERY = Param(("query", "q", "text", "keywords"), "string", "What to search for", lambda r: phrase(r, 1, 4))
TITLE = Param(("title", "name", "subject"), "string", "Title", lambda r: phrase(r, 2, 4))
PERSON = Param(("person", "name", "contact", "recipient"), "string", "Name of the person", person)
EMAIL = Param(("to", "email", "recipient", "address"), "string", "E-mail address", email)
MESSAGE = Param(("message", "body", "text", "content"), "string", "What to say", lambda r: phrase(r, 2, 6))
COUNT = Param(("limit", "count", "n", "max_results"), "integer", "How many results", _int(1, 50))
MINUTES = Param(("minutes", "duration", "length"), "integer", "Minutes", _int(1, 120))
NUMBER_A = Param(("a", "x", "first", "left"), "integer", "First number", _int(0, 999))
NUMBER_B = Param(("b", "y", "second", "right"), "integer", "Second number", _int(0, 999))
AMOUNT = Param(("amount", "value", "sum"), "integer", "Amount of money", _int(1, 5000))
ITEM = Param(("item", "product", "article"), "string", "Name of the item", _of(ITEMS))
QUANTITY = Param(("quantity", "qty", "count"), "integer", "How many", _int(1, 40))
ORDER = Param(("order_id", "order", "id"), "string", "Order number", _code("A", 5))
USER = Param(("user_id", "uid", "id"), "integer", "Id of the user", _int(1, 99_999))
PATH = Param(
    ("path", "file", "filename"), "string", "Path of the file", lambda r: f"/{word(r)}/{pseudo_word(r)}.txt"
)
UNIT = Param(
    ("unit", "units", "scale"),
    "string",
    "Temperature unit",
    _of(["celsius", "fahrenheit"]),
    ("celsius", "fahrenheit"),
)
LANGUAGE = Param(("language", "target_language", "to", "lang"), "string", "Language", _of(LANGUAGES))
CODE = Param(("currency", "from_currency", "source"), "string", "Currency code", _of(CURRENCIES))
CODE_TO = Param(("to", "to_currency", "target"), "string", "Currency to convert to", _of(CURRENCIES))
SYMBOL = Param(("symbol", "ticker", "stock"), "string", "Ticker symbol", _of(STOCKS))
TOPIC = Param(("topic", "subject", "category"), "string", "Topic", _of(TOPICS))
WORD = Param(("word", "term"), "string", "The word", _of(COMMON_WORDS))
ROOM = Param(("room", "area"), "string", "Room", _of(["kitchen", "bedroom", "bathroom", "garage", "office"]))
LEVEL = Param(("level", "percent", "value"), "integer", "Level from 0 to 100", _int(0, 100))
DEGREES = Param(("temperature", "degrees", "target"), "integer", "Degrees", _int(10, 30))
SONG = Param(("song", "title", "track"), "string", "Name of the song", lambda r: phrase(r, 1, 3).title())
ORIGIN = Param(("origin", "from", "start", "departure"), "string", "Where to start", _of(CITIES))
GOAL = Param(("destination", "to", "end", "arrival"), "string", "Where to go", city)
WEEKDAY = Param(("weekday", "day"), "string", "Day of the week", _of(WEEKDAYS), tuple(WEEKDAYS))
MONTH = Param(("month",), "string", "Name of the month", _of(MONTHS))
PEOPLE = Param(("people", "guests", "party_size", "seats"), "integer", "How many people", _int(1, 12))
NIGHTS = Param(("nights", "stay"), "integer", "How many nights", _int(1, 21))

_STATUS = {"status": _of(["ok", "done", "confirmed", "scheduled", "pending"])}

TOOLS: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "weather", "get_current_weather", "weather_lookup"),
        ("Get the current weather for a city", "Current weather in a place", "Returns the weather"),
        {"city": CITY, "unit": UNIT},
        (
            "What's the weather in {city}?",
            "What is the weather like in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather in {city} in {unit}.",
            "Weather for {city}, please.",
            "Is it warm in {city}? Use {unit}.",
            "Do I need an umbrella in {city}?",
        ),
        {"temperature": _int(-10, 40), "condition": _of(["sunny", "cloudy", "rainy", "windy", "snowy"])},
    ),
    Tool(
        ("get_weather", "weather", "query_weather"),
        ("查询城市的天气", "获取天气"),
        {"city": ZH_CITY},
        ("{city}的天气怎么样？", "{city}今天天气如何？", "查一下{city}的天气", "今天{city}冷吗？"),
        {"temperature": _int(-10, 40), "condition": _of(["晴", "多云", "小雨", "大风"])},
    ),
    Tool(
        ("get_forecast", "weather_forecast", "forecast"),
        ("Get the weather forecast for a date", "Forecast the weather of a city on a day"),
        {"city": CITY, "date": DATE},
        (
            "What will the weather be in {city} on {date}?",
            "Give me the forecast for {city} on {date}.",
            "Will it rain in {city} on {date}?",
        ),
        {"high": _int(0, 40), "low": _int(-15, 20)},
    ),
    Tool(
        ("add", "add_numbers", "sum_two", "calculator_add"),
        ("Add two numbers", "Returns the sum of two numbers"),
        {"a": NUMBER_A, "b": NUMBER_B},
        ("Use the tool to add {a} and {b}.", "Add {a} and {b}.", "What is the sum of {a} and {b}?"),
        {},
    ),
    Tool(
        ("multiply", "multiply_numbers", "product"),
        ("Multiply two numbers", "Returns the product of two numbers"),
        {"a": NUMBER_A, "b": NUMBER_B},
        (
            "Multiply {a} by {b}.",
            "What is the product of {a} and {b}?",
            "Use the tool to multiply {a} and {b}.",
        ),
        {},
    ),
    Tool(
        ("search_web", "web_search", "search", "google"),
        ("Search the web", "Find pages on the internet"),
        {"query": QUERY, "limit": COUNT},
        (
            "Search the web for {query}.",
            "Look up {query} online.",
            "Find {limit} web pages about {query}.",
            "Google {query} for me.",
        ),
        {"pages": _int(1, 90), "best": lambda r: f"{pseudo_word(r)}.example.com"},
    ),
    Tool(
        ("send_email", "email", "mail_send"),
        ("Send an e-mail", "Sends a mail to an address"),
        {"to": EMAIL, "subject": TITLE, "message": MESSAGE},
        (
            "Send an email to {to} saying {message}.",
            "Email {to} with the subject {subject} and the text {message}.",
            "Write to {to}: {message}",
        ),
        _STATUS,
    ),
    Tool(
        ("send_message", "send_sms", "text_message"),
        ("Send a text message to a contact", "Sends an SMS"),
        {"person": PERSON, "message": MESSAGE},
        ("Text {person}: {message}", "Send {person} a message saying {message}.", "Tell {person} {message}."),
        _STATUS,
    ),
    Tool(
        ("create_event", "add_calendar_event", "schedule_meeting", "calendar_add"),
        ("Create a calendar event", "Adds an event to the calendar"),
        {"title": TITLE, "date": DATE, "time": TIME},
        (
            "Schedule {title} on {date} at {time}.",
            "Put {title} in my calendar for {date}.",
            "Create an event called {title} on {date} at {time}.",
        ),
        _STATUS,
    ),
    Tool(
        ("set_alarm", "alarm", "create_alarm"),
        ("Set an alarm", "Wakes the user at a time"),
        {"time": TIME, "weekday": WEEKDAY},
        ("Set an alarm for {time}.", "Wake me up at {time} on {weekday}.", "Alarm at {time}, please."),
        _STATUS,
    ),
    Tool(
        ("set_timer", "start_timer", "timer"),
        ("Start a timer", "Counts down some minutes"),
        {"minutes": MINUTES},
        (
            "Set a timer for {minutes} minutes.",
            "Start a {minutes} minute timer.",
            "定一个{minutes}分钟的计时器。",
        ),
        _STATUS,
    ),
    Tool(
        ("translate", "translate_text", "translation"),
        ("Translate a text", "Translates text to another language"),
        {"text": MESSAGE, "language": LANGUAGE},
        (
            'Translate "{text}" into {language}.',
            "How do you say {text} in {language}?",
            "Put this into {language}: {text}",
        ),
        {"translation": pseudo_word},
    ),
    Tool(
        ("convert_currency", "currency_converter", "exchange"),
        ("Convert money between currencies", "Exchange an amount into another currency"),
        {"amount": AMOUNT, "currency": CODE, "to": CODE_TO},
        (
            "Convert {amount} {currency} to {to}.",
            "How much is {amount} {currency} in {to}?",
            "Exchange {amount} {currency} into {to}.",
        ),
        {"result": _int(1, 9999)},
    ),
    Tool(
        ("get_stock_price", "stock_quote", "quote"),
        ("Get the price of a stock", "Latest share price for a ticker"),
        {"symbol": SYMBOL},
        ("What is the stock price of {symbol}?", "How is {symbol} trading?", "Get me a quote for {symbol}."),
        {"price": _int(5, 900)},
    ),
    Tool(
        ("get_news", "news", "headlines"),
        ("Get the latest news", "Returns news headlines about a topic"),
        {"topic": TOPIC, "limit": COUNT},
        (
            "What's new in {topic}?",
            "Show me {limit} headlines about {topic}.",
            "Latest news on {topic}, please.",
        ),
        {"headline": lambda r: phrase(r, 3, 6)},
    ),
    Tool(
        ("play_music", "play_song", "music_play"),
        ("Play a song", "Plays music"),
        {"song": SONG},
        ("Play {song}.", "I want to hear {song}.", "Put on the song {song}."),
        _STATUS,
    ),
    Tool(
        ("book_flight", "reserve_flight", "flight_booking"),
        ("Book a flight", "Reserves a seat on a flight"),
        {"origin": ORIGIN, "destination": GOAL, "date": DATE},
        (
            "Book a flight from {origin} to {destination} on {date}.",
            "I need to fly from {origin} to {destination} on {date}.",
            "Get me a plane ticket to {destination} from {origin} for {date}.",
        ),
        {"flight": _code("UA", 3), "price": _int(60, 900)},
    ),
    Tool(
        ("get_directions", "route", "navigate", "directions"),
        ("Get directions between two places", "Plans a route"),
        {"origin": ORIGIN, "destination": GOAL},
        (
            "How do I get from {origin} to {destination}?",
            "Directions from {origin} to {destination}.",
            "Plan a route from {origin} to {destination}.",
        ),
        {"kilometers": _int(5, 3000), "hours": _int(1, 30)},
    ),
    Tool(
        ("book_hotel", "reserve_hotel", "hotel_booking"),
        ("Book a hotel room", "Reserves a room in a hotel"),
        {"city": CITY, "date": DATE, "nights": NIGHTS},
        (
            "Book a hotel in {city} for {nights} nights from {date}.",
            "I need a room in {city} on {date} for {nights} nights.",
            "Reserve a hotel in {city}, {nights} nights.",
        ),
        {"hotel": pseudo_word, "price": _int(40, 400)},
    ),
    Tool(
        ("reserve_table", "book_restaurant", "restaurant_booking"),
        ("Reserve a table at a restaurant", "Books a restaurant"),
        {"city": CITY, "time": TIME, "people": PEOPLE},
        (
            "Reserve a table for {people} in {city} at {time}.",
            "Book a restaurant in {city} for {people} people.",
            "We are {people} people and want to eat in {city} at {time}.",
        ),
        _STATUS,
    ),
    Tool(
        ("get_order_status", "track_order", "order_status"),
        ("Get the status of an order", "Tracks an order"),
        {"order": ORDER},
        ("Where is my order {order}?", "Track order {order}.", "What is the status of order {order}?"),
        {"status": _of(["shipped", "delivered", "packed", "lost"]), "days": _int(0, 9)},
    ),
    Tool(
        ("add_to_cart", "cart_add", "buy_item"),
        ("Add an item to the shopping cart", "Puts products in the cart"),
        {"item": ITEM, "quantity": QUANTITY},
        (
            "Add {quantity} {item}s to my cart.",
            "I want to buy {quantity} {item}s.",
            "Put {quantity} {item}s in the cart.",
        ),
        {"items": _int(1, 90)},
    ),
    Tool(
        ("get_user", "find_user", "user_info"),
        ("Get a user by id", "Returns the profile of a user"),
        {"user": USER},
        ("Who is user {user}?", "Get the profile of user {user}.", "Show me user number {user}."),
        {"name": person, "city": city},
    ),
    Tool(
        ("read_file", "open_file", "cat_file"),
        ("Read a file", "Returns the content of a file"),
        {"path": PATH},
        ("Read the file {path}.", "What is in {path}?", "Show me the content of {path}."),
        {"content": lambda r: phrase(r, 2, 6)},
    ),
    Tool(
        ("delete_file", "remove_file"),
        ("Delete a file", "Removes a file from the disk"),
        {"path": PATH},
        ("Delete {path}.", "Please remove the file {path}.", "Get rid of {path}."),
        _STATUS,
    ),
    Tool(
        ("write_note", "create_note", "save_note"),
        ("Write a note", "Saves a note"),
        {"title": TITLE, "text": MESSAGE},
        (
            "Make a note called {title}: {text}",
            "Note down {text} under {title}.",
            "Save a note titled {title} saying {text}.",
        ),
        _STATUS,
    ),
    Tool(
        ("set_light", "dim_lights", "light_control"),
        ("Set the light of a room", "Controls lamps"),
        {"room": ROOM, "level": LEVEL},
        (
            "Set the {room} light to {level} percent.",
            "Dim the lights in the {room} to {level}%.",
            "{room} lights to {level}, please.",
        ),
        _STATUS,
    ),
    Tool(
        ("set_thermostat", "set_temperature", "heating"),
        ("Set the thermostat of a room", "Controls the heating"),
        {"room": ROOM, "degrees": DEGREES},
        (
            "Heat the {room} to {degrees} degrees.",
            "Set the {room} to {degrees} degrees.",
            "Make the {room} {degrees} degrees warm.",
        ),
        _STATUS,
    ),
    Tool(
        ("define_word", "dictionary", "get_definition"),
        ("Define a word", "Looks a word up in the dictionary"),
        {"word": WORD},
        ("Define {word}.", "What does the word {word} mean?", "Look up {word} in the dictionary."),
        {"definition": lambda r: phrase(r, 3, 7)},
    ),
    Tool(
        ("pay", "transfer_money", "send_money"),
        ("Send money to a person", "Transfers an amount"),
        {"person": PERSON, "amount": AMOUNT, "currency": CODE},
        (
            "Send {amount} {currency} to {person}.",
            "Pay {person} {amount} {currency}.",
            "Transfer {amount} {currency} to {person}.",
        ),
        _STATUS,
    ),
    Tool(
        ("get_time", "current_time", "world_clock"),
        ("Get the current time in a city", "Tells what time it is somewhere"),
        {"city": CITY},
        (
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "Current time in {city}?",
            "{city}现在几点？",
        ),
        {"time": clock},
    ),
    Tool(
        ("get_population", "population"),
        ("Get the population of a city", "How many people live in a city"),
        {"city": CITY},
        ("How many people live in {city}?", "What is the population of {city}?"),
        {"population": _int(1000, 9_000_000)},
    ),
    Tool(
        ("find_holidays", "list_holidays"),
        ("List the public holidays of a month", "Finds holidays"),
        {"month": MONTH},
        ("Which holidays are there in {month}?", "List the holidays in {month}."),
        {"holidays": _int(0, 5)},
    ),
)

"""Word lists and makers of random names, words and codes for the sprout data.

Pure data and small draws from a `random.Random`; knows nothing about tasks, chats or tokens.
"""

from __future__ import annotations

from random import Random


def _words(text: str) -> list[str]:
    """Split a list written as prose."""
    return text.split()


FIRST_NAMES = _words(
    """
    Alice Ben Carla David Elena Frank Grace Henry Irene Jack Karen Leo Maria Nathan Olivia Peter Quinn
    Rosa Samuel Tina Umar Vera Walter Xenia Yusuf Zoe Anna Bob Chloe Daniel Emma Felix Hana Ivan Julia
    Kenji Laura Mateo Nina Oscar Paula Ravi Sofia Tom Mia Noah Lucas Amara Diego Fatima
    """
)
LAST_NAMES = _words(
    """
    Smith Lopez Chen Patel Kim Novak Rossi Dubois Tanaka Silva Brown Garcia Muller Ivanov Okafor Haddad
    Jensen Kowalski Nguyen Martin Weber Costa Moreau Sato Khan Berg Walsh Ferrari Wong Adams
    """
)
CITIES = _words(
    """
    Paris London Tokyo Berlin Madrid Rome Beijing Shanghai Cairo Lagos Nairobi Sydney Toronto Chicago
    Boston Seattle Denver Austin Miami Dublin Lisbon Vienna Prague Warsaw Oslo Stockholm Helsinki
    Athens Istanbul Mumbai Delhi Bangkok Seoul Osaka Lima Bogota Santiago Havana Zurich Geneva Munich
    Hamburg Lyon Milan Naples Porto Kyoto Dallas Houston Phoenix
    """
)
ZH_CITIES = _words(
    """
    北京 上海 广州 深圳 杭州 南京 成都 武汉 西安 重庆 苏州 天津 青岛 厦门 大连 长沙 巴黎 伦敦 东京 柏林
    """
)
ZH_NAMES = _words("小明 小红 小刚 小丽 李雷 韩梅梅 王芳 张伟 刘洋 陈静 赵强 周敏 吴磊 孙悦 郑浩 林晓")
ITEMS = _words(
    """
    apple pear plum banana lemon grape melon peach mango cherry book pen lamp chair table cup plate
    spoon fork bottle shirt jacket shoe hat scarf phone laptop camera clock mirror basket blanket
    candle carpet hammer ladder pencil pillow rope soap ticket towel wallet whistle window
    """
)
ZH_ITEMS = _words("苹果 梨 香蕉 橘子 葡萄 西瓜 书 铅笔 杯子 椅子 帽子 球 糖果 鸡蛋 花 硬币")
COLORS = _words("red blue green yellow black white orange purple brown gray pink silver")
ANIMALS = _words(
    """
    cat dog horse rabbit fox wolf bear lion tiger mouse owl crow duck goose sheep goat whale shark
    """
)
JOBS = _words(
    """
    nurse teacher engineer baker lawyer pilot farmer artist chemist plumber writer dentist chef
    mechanic architect librarian
    """
)
ZH_JOBS = _words("护士 老师 工程师 医生 律师 司机 农民 画家 厨师 作家")
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
LANGUAGES = _words(
    """
    English French German Spanish Italian Chinese Japanese Korean Russian Arabic Portuguese Dutch
    """
)
CURRENCIES = _words("USD EUR GBP JPY CNY CHF CAD AUD INR BRL")
STOCKS = _words("AAPL MSFT GOOG AMZN TSLA NVDA META NFLX INTC AMD IBM ORCL")
TOPICS = _words(
    """
    history music football chemistry space gardening cooking politics travel robots volcanoes painting
    chess bridges oceans medicine farming poetry trains glaciers
    """
)
COMMON_WORDS = _words(
    """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night
    point home water room mother area money story fact month lot right study eye job word business
    issue side kind head house service friend father power hour game line end member law car city
    community name president team minute idea body information back parent face others level office
    door health person art war history party result change morning reason research girl guy moment air
    teacher force education river stone garden silver winter summer autumn spring bright quiet heavy
    simple narrow early gentle hidden golden distant broken frozen rapid steady hollow green
    """
)
ZH_WORDS = _words(
    """
    时间 学校 朋友 天气 音乐 电影 城市 公园 河流 山川 大海 星空 太阳 月亮 早晨 晚上 春天 夏天 秋天 冬天
    老师 学生 医院 商店 火车 飞机 道路 桥梁 花园 森林 数据 模型 语言 问题 答案 世界
    """
)

_ONSETS = _words("b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl st tr th sh")
_VOWELS = _words("a e i o u ai ea io ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "x", "nd", "rk"]


def pick(rng: Random, options: list[str] | tuple[str, ...]) -> str:
    """Draw one option (faster than `rng.choice` for the millions of draws the data needs)."""
    return options[int(rng.random() * len(options))]


def between(rng: Random, low: int, high: int) -> int:
    """Draw an integer from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def pseudo_word(rng: Random) -> str:
    """Make up a pronounceable word, so that look-ups and names reach beyond the lists."""
    syllables = 2 if rng.random() < 0.65 else 3
    return "".join(pick(rng, _ONSETS) + pick(rng, _VOWELS) + pick(rng, _CODAS) for _ in range(syllables))


def word(rng: Random) -> str:
    """Draw a common word, or make one up."""
    return pick(rng, COMMON_WORDS) if rng.random() < 0.5 else pseudo_word(rng)


def person(rng: Random) -> str:
    """Draw a first name, sometimes with a last name, sometimes a made-up one."""
    roll = rng.random()
    if roll < 0.45:
        return pick(rng, FIRST_NAMES)
    if roll < 0.8:
        return f"{pick(rng, FIRST_NAMES)} {pick(rng, LAST_NAMES)}"
    return pseudo_word(rng).capitalize()


def city(rng: Random) -> str:
    """Draw a city, one in four made up."""
    return pick(rng, CITIES) if rng.random() < 0.75 else pseudo_word(rng).capitalize()


def digits(rng: Random, length: int) -> str:
    """Draw `length` decimal digits, leading zeros allowed."""
    return f"{int(rng.random() * 10**length):0{length}d}"


def hex_string(rng: Random, length: int) -> str:
    """Draw `length` lower-case hexadecimal digits."""
    return f"{rng.getrandbits(4 * length):0{length}x}"


def date(rng: Random) -> str:
    """Draw an ISO date."""
    return f"20{between(rng, 10, 35)}-{between(rng, 1, 12):02d}-{between(rng, 1, 28):02d}"


def clock(rng: Random) -> str:
    """Draw a 24-hour time."""
    return f"{between(rng, 0, 23):02d}:{pick(rng, ['00', '15', '30', '45', '05', '10', '20', '50'])}"


def email(rng: Random) -> str:
    """Draw an e-mail address."""
    user = pick(rng, FIRST_NAMES).lower() if rng.random() < 0.5 else pseudo_word(rng)
    return f"{user}@{pick(rng, ['example.com', 'mail.org', 'example.org', 'post.net'])}"


def phrase(rng: Random, shortest: int = 2, longest: int = 5) -> str:
    """Draw a few words in lower case."""
    return " ".join(word(rng) for _ in range(between(rng, shortest, longest)))

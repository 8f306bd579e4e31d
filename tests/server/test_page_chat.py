"""What answers look like: formulas, code and tables; and two of them beside each other."""

from __future__ import annotations

import json
from typing import Any

from tests.server.chromium import Tab
from tests.server.conftest import Running
from tests.server.test_page import BUSY, KEPT, shoot

SHAPE = """(async () => {
    const {math} = await import('/page/math.js');
    const shape = (node) => node.nodeType === 3 ? node.data
        : node.children.length ? `${node.localName}(${[...node.childNodes].map(shape).join(' ')})`
        : node.localName === 'mspace' ? '_' : node.textContent;
    return %s.map((source) => {
        const node = math(source, false);
        return node && [...node.childNodes].map(shape).join(' ');
    });
})()"""
FORMULAS = {
    r"a^2 + b_1^2 = c'": "msup(a 2) + msubsup(b 1 2) = msup(c ′)",
    r"x^23 + y_{23}": "msup(x 2) 3 + msub(y 23)",
    r"x^1,000 + \mathbf 12": "msup(x 1) , 000 + 𝟏 2",
    r"\frac{1}{2} \times 3.14": "mfrac(1 2) × 3.14",
    r"\sqrt[3]{x+1}": "mroot(mrow(x + 1) 3)",
    r"\sum_{i=0}^n i": "munderover(∑ mrow(i = 0) n) i",
    r"\int_0^\infty e^{-x}\,dx": "msubsup(∫ 0 ∞) msup(e mrow(− x)) _ d x",
    r"\lim_{x \to 0} \sin x": "munder(lim mrow(x → 0)) sin \u2061 x",
    r"\left( \frac{a}{b} \right]": "mrow(( mfrac(a b) ])",
    r"\mathbb{R}^n \to \mathbf{v}": "msup(ℝ n) → 𝐯",
    r"\text{if } x \le 3": "if\u00a0 x ≤ 3",
    r"\begin{pmatrix} a & b \\ c \\ \end{pmatrix}": "mrow(( mtable(mtr(mtd(a) mtd(b)) mtr(mtd(c))) ))",
    r"\hat{x} \quad \overline{ab}": "mover(x ^) _ mover(mrow(a b) ‾)",
    r"\alpha\beta \in \Gamma, \{1, 2\}": "α β ∈ Γ , { 1 , 2 }",
    r"\binom{n}{k} \operatorname{rank} A": "mrow(( mfrac(n k) )) rank A",
    r"\boxed{42}": "mrow(42)",
    r"\unknown{x}": None,
    r"\frac{1}": None,
    r"x^2^3": None,
    r"a } b": None,
    r"\begin{cases} 1 \end{array}": None,
    "{" * 5000: None,
    "x+" * 15_000: None,
    r"\sqrt" * 5000 + "x": None,
    r"\constructor": None,
    r"\left\toString x \right)": None,
}


def shapes(tab: Tab, sources: list[str]) -> list[str | None]:
    return tab.eval(SHAPE % json.dumps(sources))


def test_formulas_are_mathml_and_what_is_not_known_is_none(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    found = dict(zip(FORMULAS, shapes(tab, [*FORMULAS]), strict=True))
    assert {source: shape for source, shape in found.items() if shape != FORMULAS[source]} == {}
    assert tab.errors == []


TEXT = r"""# Result
The sum \(\sum_{i=1}^n i\) is $\frac{n(n+1)}{2}$, which costs $5 or $6, and `$x$` is code.

$$
\begin{aligned} a &= 1 \\ b &= \frac{1}{2} \end{aligned}
$$

What \[\nonsense\] is stays.
1. one
2. two **bold $y$**
   and more

| name | value |
|:--|--:|
| a | $1$ |
| b | 2 |

```python
if a < b: print("<b>$x$</b>")
```
An end <script>alert(1)</script>"""


RENDERED = """(async () => {
    const {render} = await import('/page/markdown.js');
    const box = Object.assign(document.createElement('div'), {className: 'text'});
    box.append(...render(%s));
    const count = (selector) => box.querySelectorAll(selector).length;
    const text = (selector) => box.querySelector(selector)?.textContent;
    return {names: [...box.children].map(({localName}) => localName), text: box.textContent,
        formulas: count('math'), displayed: count('math[display=block]'), cells: count('td, th'),
        items: [...box.querySelectorAll('li')].map(({textContent}) => textContent),
        code: text('pre'), language: text('.code-head span'), scripts: count('script, b')};
})()"""


def rendered(tab: Tab, text: str) -> Any:
    return tab.eval(RENDERED % json.dumps(text))


def test_an_answer_has_formulas_code_lists_and_tables(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    seen = rendered(tab, TEXT)
    assert seen["names"] == ["h3", "p", "math", "p", "ol", "div", "div", "p"]
    assert (seen["formulas"], seen["displayed"], seen["cells"], seen["scripts"]) == (5, 1, 6, 0)
    assert seen["items"][0] == "one" and seen["items"][1].endswith("and more")
    assert (seen["language"], seen["code"]) == ("python", 'if a < b: print("<b>$x$</b>")')
    assert r"\[\nonsense\]" in seen["text"] and "costs $5 or $6" in seen["text"]
    assert "<script>alert(1)</script>" in seen["text"] and "$x$ is code" in seen["text"]
    for end in range(0, len(TEXT), 7):  # as it streams
        assert rendered(tab, TEXT[:end])["scripts"] == 0
    assert tab.errors == []


REPEATED = [
    *(("", text) for text in ("\\[", "\\(", "**", "$ ", "`", "a\n", "# a\n")),
    *(("$$", " "), ("a|\n", " ")),
]


def test_what_repeats_itself_for_ever_is_drawn_in_one_pass(tab: Tab, server: Running) -> None:
    """As answers do that run wild; a look at all that follows, behind each beginning, would take hours."""
    tab.open_anew(server.url)
    for beginning, repeated in REPEATED:
        source = f"{json.dumps(beginning)} + {json.dumps(repeated)}.repeat(300000) + 'end'"
        num = tab.eval(f"import('/page/markdown.js').then(({{render}}) => render({source}).length)")
        assert num > 0, (beginning, repeated)
    assert tab.errors == []


def test_two_answers_come_side_by_side_and_one_goes_on(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    tab.until("document.querySelector('#model').textContent === 'sprout'")
    assert tab.eval("document.querySelector('#model-choice').hidden"), "there is one model"
    tab.eval("document.querySelector('#temperature').value = 0")
    tab.click("#compares")
    tab.eval("document.querySelector('#other_temperature').value = 0.1")
    tab.eval("window.both = 0")
    tab.eval("""new MutationObserver(() => {
        both ||= document.querySelectorAll('.pair .thinking.busy').length === 2;
    }).observe(document.querySelector('#messages'), {subtree: true, attributes: true, childList: true})""")
    tab.type("#draft", "Sort in ascending order: 930, 425, 341, 84, 278")
    tab.until(f"document.querySelector('.pair') !== null && !({BUSY})")
    assert tab.eval("both"), "both stream at once"
    heads = "[...document.querySelectorAll('.pair h2')].map(({textContent}) => textContent)"
    assert tab.eval(heads) == ["sprout · temperature 0.00", "sprout · temperature 0.10"]
    for side in (1, 2):
        assert tab.text(f".pair .message:nth-child({side}) .text") == "84, 278, 341, 425, 930"
    lefts = (
        "[...document.querySelectorAll('.pair .message')].map((node) => node.getBoundingClientRect().left)"
    )
    left, right = tab.eval(lefts)
    assert right > left + 200, "in two columns"
    shoot(tab, "compare")
    tab.reload()
    assert tab.eval(heads) == ["sprout · temperature 0.00", "sprout · temperature 0.10"], "they are kept"
    assert tab.eval(
        "document.querySelector('#compares').checked && !document.querySelector('#other-side').hidden"
    )
    tab.eval("""[...document.querySelectorAll('.pair .message:nth-child(2) .act')]
        .find(({textContent}) => textContent === 'go on with this one').click()""")
    assert tab.eval("document.querySelectorAll('.pair').length") == 0
    assert tab.eval(f"{KEPT}[0].turns[1].side.temperature") == 0.1
    assert tab.text(".assistant .text") == "84, 278, 341, 425, 930"
    assert tab.errors == []


def test_two_answers_are_asked_for_and_stopped_by_keys_alone(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    tab.until("document.querySelector('#model').textContent === 'sprout'")

    def press(key: str, code: str, number: int, **more: str) -> None:
        for kind in ("keyDown", "keyUp"):
            tab.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=number, **more
            )

    tab.eval("document.querySelector('#draft').focus()")
    seen: list[str] = []
    while "compares" not in seen:
        assert len(seen) < 20, seen
        press("Tab", "Tab", 9)
        seen.append(tab.eval("document.activeElement.id"))
    press(" ", "Space", 32, text=" ")
    assert tab.eval(
        "document.querySelector('#compares').checked && !document.querySelector('#other-side').hidden"
    )
    press("Tab", "Tab", 9)
    assert tab.eval("document.activeElement.id") == "other_temperature"
    press("ArrowLeft", "ArrowLeft", 37)
    assert tab.text("label[for=other_temperature] output") == "0.95"
    tab.type("#draft", "Sort in ascending order: " + ", ".join(str(n * 37 % 1000) for n in range(60)))
    tab.until("document.querySelectorAll('.pair .thinking.busy').length === 2")
    press("Escape", "Escape", 27)
    tab.until(f"!({BUSY})")
    facts = "[...document.querySelectorAll('.pair .facts')].map(({textContent}) => textContent)"
    assert all("stopped" in each for each in tab.eval(facts)) and len(tab.eval(facts)) == 2
    server.wait_until_idle()
    assert tab.errors == []


def test_each_side_reads_its_own_answers(tab: Tab, server: Running) -> None:
    tab.open_anew(server.url)
    said = tab.eval("""(async () => {
        const {messagesOf} = await import('/page/conversations.js');
        const answer = (content, error) => ({role: 'assistant', content, error});
        const question = (content) => ({role: 'user', content});
        const both = (...answers) => ({role: 'assistant', answers});
        const turns = [question('a'), both(answer('left'), answer('right')), question('b'), answer('alone'),
            question('c'), both(answer('fine'), answer('', 'refused'))];
        return [0, 1].map((side) => messagesOf(turns, '', side).map(({content}) => content));
    })()""")
    assert said == [["a", "left", "b", "alone", "c", "fine"], ["a", "right", "b", "alone"]]

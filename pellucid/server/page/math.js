// Formulas: the LaTeX that models write, as MathML, which browsers draw themselves.  What is not known is no formula.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MOST_DEEP = 60; // levels of braces and commands within each other
const MOST_LONG = 20_000; // letters
const TOKEN = /\\([A-Za-z]+\*?|[^])|(\d+(?:[.,]\d+)*|\.\d+)|\s+|([^])/gu;

// Without a prototype: \constructor is no command.
const dictionary = (entries) => Object.assign(Object.create(null), entries);
const named = (text) => dictionary(Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split(":"))));

const LETTERS = named(`alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ
  lambda:λ mu:μ nu:ν xi:ξ pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω
  ell:ℓ hbar:ℏ imath:ı jmath:ȷ wp:℘ aleph:ℵ`);
// Upright ones.
const SYMBOLS = named(`Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω infty:∞ partial:∂
  nabla:∇ emptyset:∅ varnothing:∅ Re:ℜ Im:ℑ angle:∠ degree:° top:⊤ bot:⊥ square:□ blacksquare:■ triangle:△ checkmark:✓
  dots:… ldots:… cdots:⋯ vdots:⋮ ddots:⋱ dotsc:… dotsb:⋯ %:% $:$ #:# &:& _:_ pounds:£ dagger:† prime:′ hslash:ℏ star:⋆`);
const OPERATORS = named(`pm:± mp:∓ times:× div:÷ cdot:⋅ ast:∗ circ:∘ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ odot:⊙ cap:∩ cup:∪
  setminus:∖ wedge:∧ land:∧ vee:∨ lor:∨ neg:¬ lnot:¬ le:≤ leq:≤ leqslant:⩽ ge:≥ geq:≥ geqslant:⩾ ne:≠ neq:≠ ll:≪ gg:≫ sim:∼
  simeq:≃ approx:≈ cong:≅ equiv:≡ propto:∝ prec:≺ succ:≻ subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ in:∈ notin:∉ ni:∋ mid:∣
  nmid:∤ parallel:∥ perp:⊥ vdash:⊢ models:⊨ to:→ rightarrow:→ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ Leftarrow:⇐
  Leftrightarrow:⇔ implies:⟹ impliedby:⟸ iff:⟺ longrightarrow:⟶ longleftarrow:⟵ mapsto:↦ uparrow:↑ downarrow:↓ forall:∀
  exists:∃ nexists:∄ therefore:∴ because:∵ colon:: coloneqq:≔ triangleq:≜ doteq:≐ asymp:≍ ltimes:⋉ rtimes:⋊`);
const BIG = named("sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀");
const INTEGRALS = named("int:∫ iint:∬ iiint:∭ oint:∮");
const FENCES = named("lbrace:{ rbrace:} {:{ }:} langle:⟨ rangle:⟩ lvert:| rvert:| vert:| lVert:‖ rVert:‖ Vert:‖ |:‖ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉");
const LIMITS = "lim limsup liminf max min sup inf argmax argmin det gcd Pr".split(" ");
const FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp dim ker deg hom arg sgn".split(" ");
const SPACES = dictionary({ ",": 0.17, ":": 0.22, ">": 0.22, ";": 0.28, "!": -0.17, " ": 0.25, quad: 1, qquad: 2, thinspace: 0.17 });
const ACCENTS = dictionary({ hat: "^", widehat: "^", bar: "‾", vec: "→", tilde: "~", widetilde: "~", dot: "˙", ddot: "¨", check: "ˇ",
  overline: "‾", overrightarrow: "→", overbrace: "⏞" });
const UNDER = dictionary({ underline: "_", underbrace: "⏟" });
const STYLES = dictionary({ mathbf: "bold", boldsymbol: "bold", bm: "bold", mathbb: "double", mathcal: "script", mathscr: "script",
  mathfrak: "fraktur", mathrm: "upright", mathit: "italic", mathsf: "upright", mathtt: "upright" });
const WORDS = ["text", "textbf", "textit", "textrm", "texttt", "mbox", "operatorname", "operatorname*"];
const NOTHING = ["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr",
  "biggl", "biggr", "nonumber", "notag", "hline"];
// [left fence, right fence, where columns stand: by turns]
const TABLES = { matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"], cases: ["{", "", ["left"]], array: ["", ""], aligned: ["", "", ["right", "left"]], align: ["", "", ["right", "left"]],
  "align*": ["", "", ["right", "left"]], split: ["", "", ["right", "left"]], gathered: ["", ""], gather: ["", ""], equation: ["", ""], "equation*": ["", ""] };
// Where the first capital, small letter and digit of a style stand, and the letters that stand elsewhere.
const ALPHABETS = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce, {}],
  double: [0x1d538, 0x1d552, 0x1d7d8, named("C:ℂ H:ℍ N:ℕ P:ℙ Q:ℚ R:ℝ Z:ℤ")],
  script: [0x1d49c, 0x1d4b6, null, named("B:ℬ E:ℰ F:ℱ H:ℋ I:ℐ L:ℒ M:ℳ R:ℛ e:ℯ g:ℊ o:ℴ")],
  fraktur: [0x1d504, 0x1d51e, null, named("C:ℭ H:ℌ I:ℑ R:ℜ Z:ℨ")],
};

/** A formula as a node; null for what is none, or uses what is not known here. */
export function math(source, isDisplay) {
  if (source.length > MOST_LONG) return null;
  try {
    const reader = new Reader(source);
    const body = reader.row(() => false);
    const node = element("math", body);
    if (isDisplay) node.setAttribute("display", "block");
    return node;
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

class Unknown extends Error {}

function element(name, children = [], attributes = {}) {
  const node = document.createElementNS(MATHML, name);
  node.append(...(Array.isArray(children) ? children : [children]));
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

const one = (nodes) => (nodes.length === 1 ? nodes[0] : element("mrow", nodes));
const operator = (text, attributes) => element("mo", text, attributes);
const fence = (text, isStretchy) => operator(text, { stretchy: String(isStretchy) });
const space = (em) => element("mspace", [], { width: `${em}em` });

/** Letters in another alphabet. */
function styled(text, style) {
  const [capital, small, digit, others] = ALPHABETS[style];
  const shift = (letter, from, to) => String.fromCodePoint(to + letter.codePointAt(0) - from.codePointAt(0));
  return [...text].map((letter) => {
    if (others[letter]) return others[letter];
    if (/[A-Z]/.test(letter)) return shift(letter, "A", capital);
    if (/[a-z]/.test(letter)) return shift(letter, "a", small);
    return digit !== null && /\d/.test(letter) ? shift(letter, "0", digit) : letter;
  }).join("");
}

/** What a formula is written in, without its white space.  at: where in the source. */
function tokens(source) {
  return [...source.matchAll(TOKEN)]
    .map(({ 0: text, 1: command, 2: num, 3: letter, index: at }) => ({ text, command, num, letter, at }))
    .filter(({ command, num, letter }) => command ?? num ?? letter);
}

class Reader {
  constructor(source) {
    this.source = source;
    this.tokens = tokens(source);
    this.next = 0;
    this.depth = 0;
    this.style = null; // of letters
  }

  get token() {
    return this.tokens[this.next];
  }

  take() {
    if (!this.token) throw new Unknown();
    return this.tokens[this.next++];
  }

  is(text) {
    return this.token?.text === text;
  }

  expect(text) {
    if (this.take().text !== text) throw new Unknown();
  }

  /** Nodes up to where `isEnd`, or the end of all. */
  row(isEnd) {
    const nodes = [];
    while (this.token && !isEnd()) nodes.push(...this.scripted());
    return nodes;
  }

  /** What stands next, with its indices and exponents. */
  scripted() {
    const isScript = this.is("^") || this.is("_") || this.is("'");
    const nodes = isScript ? [element("mrow")] : this.atom();
    let under = null, over = null, primes = "";
    for (;;) {
      if (this.is("'")) {
        this.take();
        primes += "′";
      } else if (this.is("_") && under === null) {
        this.take();
        under = this.argument();
      } else if (this.is("^") && over === null) {
        this.take();
        over = this.argument();
      } else break;
    }
    if (this.is("^") || this.is("_")) throw new Unknown(); // a second one
    if (primes) over = over === null ? operator(primes) : element("mrow", [operator(primes), over]);
    if (under === null && over === null) return nodes;
    const base = nodes.pop() ?? element("mrow");
    const names = base.hasAttribute("data-limits") ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    const name = names[over === null ? 0 : under === null ? 1 : 2];
    return [...nodes, element(name, [base, under, over].filter((part) => part !== null))];
  }

  /** A group in braces, or one token. */
  argument() {
    if (this.is("{")) return this.group();
    if (this.token?.num?.length > 1) this.splitNumber();
    return one(this.atom());
  }

  /** Of a number without braces the first digit counts: x^23 is x² 3, and x^1,000 is x¹ , 000. */
  splitNumber() {
    const { text, at } = this.token;
    const rest = tokens(text.slice(1)).map((token) => ({ ...token, at: token.at + at + 1 }));
    this.tokens.splice(this.next, 1, { text: text[0], num: text[0], at }, ...rest);
  }

  group() {
    this.expect("{");
    const nodes = this.row(() => this.is("}"));
    this.expect("}");
    return one(nodes);
  }

  /** The letters of a group, as they are. */
  words() {
    this.expect("{");
    const start = this.tokens[this.next - 1].at + 1;
    for (let deep = 1; deep; ) {
      const { text } = this.take();
      deep += text === "{" ? 1 : text === "}" ? -1 : 0;
    }
    return this.source.slice(start, this.tokens[this.next - 1].at);
  }

  /** One token, or a command or group with all that belongs to it. */
  atom() {
    if (++this.depth > MOST_DEEP) throw new Unknown();
    const nodes = this.nextAtom();
    this.depth--;
    return nodes;
  }

  nextAtom() {
    const { text, command, num, letter } = this.take();
    if (num) return [element("mn", this.style in ALPHABETS ? styled(num, this.style) : num)];
    if (command !== undefined) return this.command(command);
    if (text === "{") {
      this.next--;
      return [this.group()];
    }
    if (text === "}" || text === "&" || text === "$") throw new Unknown();
    if (text === "~") return [space(0.25)];
    if (/\p{L}/u.test(letter)) return [this.letter(letter)];
    if ("()[]|".includes(letter)) return [fence(letter, false)];
    return [operator({ "-": "−", "*": "∗" }[letter] ?? letter)];
  }

  letter(letter) {
    if (this.style in ALPHABETS) return element("mi", styled(letter, this.style));
    return element("mi", letter, this.style === "upright" ? { mathvariant: "normal" } : {});
  }

  command(name) {
    if (name in LETTERS) return [element("mi", LETTERS[name])];
    if (name in SYMBOLS) return [element("mi", SYMBOLS[name], { mathvariant: "normal" })];
    if (name in OPERATORS) return [operator(OPERATORS[name])];
    if (name in BIG) return [operator(BIG[name], { movablelimits: "true", largeop: "true", "data-limits": "true" })];
    if (name in INTEGRALS) return [operator(INTEGRALS[name], { largeop: "true" })];
    if (name in FENCES) return [fence(FENCES[name], false)];
    if (LIMITS.includes(name)) return [operator(name.replace(/^(arg|lim)(?=.)/, "$1\u2009"), { movablelimits: "true", "data-limits": "true" })];
    if (FUNCTIONS.includes(name)) return [element("mi", name), operator("\u2061")];
    if (name in SPACES) return [space(SPACES[name])];
    if (NOTHING.includes(name)) return [];
    if (WORDS.includes(name)) return [element(name.startsWith("operator") ? "mi" : "mtext", this.words().replaceAll(" ", "\u00a0"))];
    if (name in STYLES) return [this.styledGroup(STYLES[name])];
    if (name in ACCENTS) return [element("mover", [this.argument(), operator(ACCENTS[name])], { accent: "true", ...limitsOf(name) })];
    if (name in UNDER) return [element("munder", [this.argument(), operator(UNDER[name])], limitsOf(name))];
    return this.construct(name);
  }

  styledGroup(style) {
    const before = this.style;
    this.style = style;
    const node = this.argument();
    this.style = before;
    return node;
  }

  construct(name) {
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac":
        return [element("mfrac", [this.argument(), this.argument()])];
      case "binom": case "dbinom": case "tbinom": {
        const pair = element("mfrac", [this.argument(), this.argument()], { linethickness: "0" });
        return [element("mrow", [fence("(", true), pair, fence(")", true)])];
      }
      case "sqrt": return [this.root()];
      case "left": return [this.fenced()];
      case "middle": return [fence(this.fenceText(), true)];
      case "begin": return [this.table()];
      case "overset": case "stackrel": return [this.stacked("mover")];
      case "underset": return [this.stacked("munder")];
      case "boxed": return [element("mrow", this.argument(), { class: "boxed" })];
      case "not": return [operator(`${this.argument().textContent}\u0338`)];
      case "bmod": case "mod": return [operator("mod", { lspace: "0.28em", rspace: "0.28em" })];
      case "pmod": return [space(0.5), element("mrow", [fence("(", false), element("mi", "mod"), space(0.3), this.argument(), fence(")", false)])];
      case "tag": case "label": return (this.words(), []);
      default: throw new Unknown();
    }
  }

  root() {
    if (!this.is("[")) return element("msqrt", this.argument());
    this.take();
    const degree = one(this.row(() => this.is("]")));
    this.expect("]");
    return element("mroot", [this.argument(), degree]);
  }

  stacked(name) {
    const small = this.argument();
    return element(name, [this.argument(), small]);
  }

  fenceText() {
    const { text, command } = this.take();
    if (text === ".") return "";
    if (command !== undefined && !(command in FENCES)) throw new Unknown();
    return command === undefined ? { "<": "⟨", ">": "⟩" }[text] ?? text : FENCES[command];
  }

  fenced() {
    const left = this.fenceText();
    const nodes = this.row(() => this.is("\\right"));
    this.expect("\\right");
    return element("mrow", [fence(left, true), ...nodes, fence(this.fenceText(), true)]);
  }

  table() {
    const name = this.words();
    if (!Object.hasOwn(TABLES, name)) throw new Unknown();
    if (name === "array") this.words(); // how its columns stand
    const [left, right, aligns = ["center"]] = TABLES[name];
    const rows = [[]];
    const isEnd = () => this.is("&") || this.is("\\\\") || this.is("\\end");
    for (;;) {
      rows.at(-1).push(element("mtd", this.row(isEnd), { class: aligns[rows.at(-1).length % aligns.length] }));
      const { text } = this.take();
      if (text === "\\\\") rows.push([]);
      else if (text === "\\end") break;
    }
    if (this.words() !== name) throw new Unknown();
    if (rows.at(-1).length === 1 && !rows.at(-1)[0].hasChildNodes()) rows.pop(); // behind a last line break
    const table = element("mtable", rows.map((cells) => element("mtr", cells)), { displaystyle: String(aligns.length > 1) });
    return element("mrow", [left && fence(left, true), table, right && fence(right, true)].filter(Boolean));
  }
}

function limitsOf(name) {
  return name.endsWith("brace") ? { "data-limits": "true" } : {};
}

"""The frame of the report: one HTML file that asks for nothing from anywhere.

Everything that comes from a run folder passes through `escape`. Were that forgotten somewhere, the
browser would still run no script but the one below, whose hash the page states, and would load
nothing (Content-Security-Policy).
"""

import hashlib
import html
from base64 import b64encode
from collections.abc import Iterable, Sequence

GENERATOR = '<meta name="generator" content="run report, cookiecutter-accelerate">'

STYLE = """
:root{color-scheme:light dark;--page:#fff;--card:#f5f7f9;--text:#1c2127;--soft:#5c6670;
--rule:#dde2e7;--grid:#e9edf0;--good:#0a7d55;--bad:#c4320a;--warn:#8f6200;--calm:#0a68a8;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b3579a;--c4:#c98a00;--c5:#4aa8e0;--c6:#7a828b;
--c7:#6b4bb8}
@media (prefers-color-scheme:dark){
:root{--page:#13161a;--card:#1c2026;--text:#e6e9ed;--soft:#9aa4af;--rule:#333a42;--grid:#262c33;
--good:#4fc79b;--bad:#ff8a65;--warn:#e0b04a;--calm:#6cb8ee;--c0:#4da6e0;--c1:#ff8a47;--c2:#35c398;
--c3:#e08cc6;--c4:#e6ae33;--c5:#9fd4f5;--c6:#9aa4af;--c7:#a88df0}
}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0 auto;max-width:1160px;padding:28px 20px 64px;background:var(--page);
color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
overflow-wrap:anywhere}
h1{margin:2px 0 0;font-size:26px;line-height:1.25;font-weight:650}
h2{margin:52px 0 18px;padding-top:18px;border-top:1px solid var(--rule);font-size:20px;
font-weight:650}
h3{margin:28px 0 8px;font-size:15px;font-weight:650}
h4{margin:14px 0 2px;font-size:13px;font-weight:600}
p{margin:8px 0;max-width:75ch}
small,.soft{color:var(--soft);font-size:13px;font-weight:400}
a{color:var(--calm)}
b{font-weight:600}
nav{margin:22px 0 0;display:flex;flex-wrap:wrap;gap:4px 18px;font-size:14px}
nav a{text-decoration:none;padding:3px 0}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:8px 0;padding:12px 14px;background:var(--card);border-radius:8px;overflow-x:auto;
white-space:pre-wrap}
.state{display:inline-block;margin-left:10px;padding:2px 11px;border-radius:99px;font-size:13px;
font-weight:600;vertical-align:middle;border:1px solid;white-space:nowrap}
.finished{color:var(--good)}.running{color:var(--calm)}.failed,.damaged{color:var(--bad)}
.preempted,.interrupted{color:var(--warn)}
td .state{margin:0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(168px,1fr));gap:10px;
margin:20px 0 0}
.facts div{padding:11px 14px;background:var(--card);border-radius:8px;min-width:0}
.facts dt{color:var(--soft);font-size:13px}
.facts dd{margin:1px 0 0;font-size:19px;font-weight:600;line-height:1.3;
font-variant-numeric:tabular-nums}
.facts dd small{display:block;line-height:1.45}
.box{margin:18px 0 0;padding:12px 16px;border-left:4px solid var(--bad);background:var(--card);
border-radius:0 8px 8px 0}
.box.mild{border-color:var(--warn)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));
gap:34px 36px;align-items:end}
figure{margin:0;min-width:0}
.wide{grid-column:1/-1}
figcaption{font-weight:600}
figcaption small{margin-left:6px}
.legend{display:flex;flex-wrap:wrap;gap:0 16px;margin:2px 0 8px;padding:0;list-style:none;
font-size:13px;color:var(--soft);min-height:20px}
.legend li{min-width:0}
.legend b{color:var(--text);font-variant-numeric:tabular-nums}
.many .legend{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,240px),1fr))}
.many .band{opacity:.09}
.key{width:22px;height:8px;margin-right:5px;overflow:visible}
.plot{position:relative;height:190px;margin:0 10px 27px 46px;touch-action:pan-y}
.wide .plot{height:270px}
.plot svg{position:absolute;width:100%;height:100%;overflow:visible}
i{font-style:normal}
.x,.y{position:absolute;font-size:12px;line-height:14px;color:var(--soft);white-space:nowrap;
font-variant-numeric:tabular-nums}
.y{right:100%;margin:-7px 8px 0 0}
.x{top:100%;margin-top:9px;transform:translateX(-50%)}
path{vector-effect:non-scaling-stroke;fill:none;stroke-linejoin:round}
.grid{stroke:var(--grid)}
.line{stroke:var(--c);stroke-width:1.7}
path.dots{stroke:var(--c);stroke-width:6;stroke-linecap:round;stroke-dasharray:none}
.band{fill:var(--c);opacity:.2}
.part{fill:var(--c);stroke:var(--page);stroke-width:.6;opacity:.85}
.patch{stroke:var(--c);stroke-width:9;opacity:.85}
.patch.around{opacity:.25}
.restart{stroke:var(--soft);stroke-dasharray:2 4}
.spike{stroke:var(--text);stroke-width:7;stroke-linecap:round}
.key .spike{stroke-dasharray:0 99;transform:translateX(8px)}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}
.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}
.d1{stroke-dasharray:9 2}.d2{stroke-dasharray:4 2}.d3{stroke-dasharray:10 2 2 2}
.d4{stroke-dasharray:2 2}.d5{stroke-dasharray:15 3}.d6{stroke-dasharray:7 2 2 2 2 2}
.d7{stroke-dasharray:4 2 1 2}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);pointer-events:none}
.tip{position:absolute;top:-4px;padding:5px 9px;border:1px solid var(--rule);border-radius:6px;
background:var(--page);font-size:12px;line-height:1.45;white-space:pre;pointer-events:none;
font-variant-numeric:tabular-nums;z-index:1;max-width:75%;overflow:hidden;text-overflow:ellipsis}
.bars{margin:6px 0;padding:0;list-style:none;font-size:13px}
.bars div{display:flex;height:16px;margin:3px 0 10px;border-radius:4px;overflow:hidden}
.bars span{background:var(--c);min-width:0}
.timeline{margin:0 10px 0 0}
.row{display:flex;align-items:center;font-size:13px;color:var(--soft)}
.row span{flex:0 0 104px}
.row svg{flex:1;height:14px;margin:3px 0;min-width:0;background:var(--card);overflow:visible}
.row path{stroke-width:2;stroke:var(--c)}
.hours{position:relative;height:24px;margin-left:104px}
.hours .x{top:0;margin-top:4px}
.hours .x:first-child{transform:none}
.scroll{overflow-x:auto;margin:8px 0}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:5px 18px 5px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid);
white-space:nowrap}
th{color:var(--soft);font-weight:500;font-size:13px}
.n{text-align:right}
.best td{font-weight:650}
.long td{white-space:normal;min-width:110px;max-width:640px}
.long td.n{min-width:0}
details{margin:10px 0}
summary{cursor:pointer;font-weight:600;padding:3px 0}
.pictures{display:flex;flex-wrap:wrap;gap:16px}
.pictures img{max-width:100%;height:auto;border-radius:6px;background:#fff;
image-rendering:pixelated}
footer{margin-top:56px;padding-top:14px;border-top:1px solid var(--rule);color:var(--soft);
font-size:13px}
@media (max-width:520px){
body{padding:20px 16px 48px}
.facts{grid-template-columns:1fr 1fr}
.wide .plot{height:220px}
.state{margin-left:0}
h1 .state{display:table;margin-top:8px}
}
@media print{details>*{display:block}}
"""

SCRIPT = """
for (const plot of document.querySelectorAll(".plot[data-x]")) {
  const [x0, x1, unit] = plot.dataset.x.split(" ").map(Number);
  const [y0, y1, isLog] = plot.dataset.y.split(" ").map(Number);
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  let lines;
  const points = path => {
    const found = [], numbers = path.getAttribute("d").match(/-?\\d+/g).map(Number);
    for (let i = 0, x = 0, y = 0; i < numbers.length; i += 2)
      found.push([x += numbers[i], y += numbers[i + 1]]);
    return found;
  };
  const show = event => {
    lines ??= [...plot.querySelectorAll("[data-name]")].map(p => [p.dataset.name, points(p)]);
    const box = plot.getBoundingClientRect();
    const at = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const near = all => all.reduce((a, b) =>
      Math.abs(b[0] - at * 1000) < Math.abs(a[0] - at * 1000) ? b : a);
    const x = near(lines.map(line => near(line[1])))[0] / 1000;
    const rows = lines.map(([name, all]) => {
      const height = 1 - near(all)[1] / 10000;
      const value = isLog ? y0 * (y1 / y0) ** height : y0 + (y1 - y0) * height;
      return name + "  " + Number(value.toPrecision(4));
    });
    const step = Math.round((x0 + (x1 - x0) * x) / unit) * unit;
    tip.textContent = ["step " + step.toLocaleString("en"), ...rows].join("\\n");
    cursor.style.left = x * 100 + "%";
    tip.style.left = x < 0.5 ? x * 100 + 2 + "%" : "auto";
    tip.style.right = x < 0.5 ? "auto" : (1 - x) * 100 + 2 + "%";
    plot.append(cursor, tip);
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
}
"""


def escape(value: object, most: int = 300) -> str:
    """Return a value as text that is safe in HTML and in a quoted attribute.

    Characters that are not printable, such as those that reverse the direction of text, are
    replaced; more than so many characters are cut.
    """
    text = str(value)
    text = text if len(text) <= most else f"{text[:most]} ..."
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return html.escape(text, quote=True)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    kind: str = "",
) -> str:
    """Return a table in a box that scrolls by itself.

    Args:
        head: the names of the columns, escaped.
        rows: their cells, escaped.
        numbers: the columns that are aligned to the right.
        kind: a class of the style sheet.
    """
    right = {*numbers}

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag} class=n>{one}</{tag}>" if i in right else f"<{tag}>{one}</{tag}>"
            for i, one in enumerate(texts)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>" if head else ""
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def details(summary: str, content: str, *, is_open: bool = False) -> str:
    """Return content that opens below its summary, which is escaped here."""
    return f"<details{' open' * is_open}><summary>{escape(summary)}</summary>{content}</details>"


def page(title: str, body: str, *, kind: str = "") -> str:
    """Return the whole page; its kind is a class of the style sheet."""
    digest = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src"
        f" 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="referrer" content="no-referrer"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n"
        f'<body class="{kind}">{body}\n<script>{SCRIPT}</script></body></html>\n'
    )

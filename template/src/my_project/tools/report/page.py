"""The frame of the report: one HTML file that loads nothing.

Everything that comes from a run folder passes through `escape`. Even if a value were not escaped,
the browser would run only the script below, whose hash the page states, and would load nothing
(Content-Security-Policy).
"""

import hashlib
import html
from base64 import b64encode
from collections.abc import Sequence

GENERATOR = '<meta name="generator" content="run report, cookiecutter-accelerate">'
MAX_ROWS = 500  # of a table

STYLE = """
:root{color-scheme:light dark;--page:light-dark(#fff,#13161a);--card:light-dark(#f5f7f9,#1c2026);
--text:light-dark(#1c2127,#e6e9ed);--soft:light-dark(#5c6670,#9aa4af);
--grid:light-dark(#e3e7eb,#2a3038);--good:light-dark(#0a7d55,#4fc79b);
--bad:light-dark(#c4320a,#ff8a65);--warn:light-dark(#8f6200,#e0b04a)}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1160px;padding:24px 18px 60px;background:var(--page);
color:var(--text);font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h2{margin:48px 0 16px;padding-top:16px;border-top:1px solid var(--grid);font-size:20px}
th,.legend,footer{color:var(--soft);font-size:13px;font-weight:400}
pre{padding:12px 14px;background:var(--card);border-radius:8px;white-space:pre-wrap}
.state{white-space:nowrap;padding:2px 11px;border:1px solid;border-radius:99px;font-size:13px}
.finished{color:var(--good)}.failed,.damaged{color:var(--bad)}
.preempted,.interrupted{color:var(--warn)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));
gap:34px 36px;align-items:end}
figure{margin:0;min-width:0}
figure:first-child{grid-column:1/-1}
figure:first-child .plot{height:270px}
figcaption,summary{font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:0 16px;margin:2px 0 8px}
code span{display:inline-block}
details{margin-top:20px}
.key{width:22px;height:8px;margin-right:5px}
.plot{position:relative;height:200px;margin:0 10px 27px 46px;touch-action:pan-y}
.plot svg{position:absolute;width:100%;height:100%;overflow:visible}
i{position:absolute;font:12px/14px system-ui,sans-serif;color:var(--soft);white-space:nowrap}
.y{right:100%;margin:-7px 8px 0 0}
.x{top:100%;margin-top:9px;transform:translateX(-50%)}
output{position:absolute;top:0;max-width:75%;padding:0 8px;overflow:hidden;font-size:12px;
white-space:pre;background:var(--page);border:solid var(--soft);border-width:0 1px}
output:empty{display:none}
path{vector-effect:non-scaling-stroke;fill:none;stroke:var(--c);stroke-width:1.7;
stroke-linejoin:round;stroke-linecap:round}
.grid{stroke:var(--grid);stroke-width:1}
.band{fill:var(--c);stroke:none;opacity:.2}
path.dots{stroke-width:6;stroke-dasharray:none}
.restart{--c:var(--soft);stroke-dasharray:2 4}
.checkpoint{--c:var(--good);stroke-width:3}
.skipped{--c:var(--bad);stroke-width:3}
.spike{--c:var(--text);stroke-width:3}
.check{--c:var(--bad);stroke-dasharray:6 3}
.c0{--c:light-dark(#0072b2,#4da6e0)}
.c1{--c:light-dark(#d55e00,#ff8a47);stroke-dasharray:8 4}
.c2{--c:light-dark(#009e73,#35c398);stroke-dasharray:4 4}
.c3{--c:light-dark(#b3579a,#e08cc6);stroke-dasharray:10 4 1 4}
.c4{--c:light-dark(#c98a00,#e6ae33);stroke-dasharray:1 4}
.c5{--c:light-dark(#4aa8e0,#9fd4f5);stroke-dasharray:15 5}
.c6{--c:light-dark(#7a828b,#9aa4af);stroke-dasharray:7 4 1 4 1 4}
.c7{--c:light-dark(#6b4bb8,#a88df0);stroke-dasharray:4 4 1 4}
.scroll{overflow-x:auto;margin:8px 0 24px}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
td p{margin:0}
th,td:first-child{overflow-wrap:normal}
.runs th{overflow-wrap:anywhere}
th,td{min-width:90px;max-width:800px;padding:5px 18px 5px 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--grid)}
img{max-width:100%;margin:0 16px 16px 0;image-rendering:pixelated}
"""

SCRIPT = """
for (const plot of document.querySelectorAll(".plot")) {
  const [x0, x1, y0, y1, isLog] = plot.dataset.axes.split(" ").map(Number);
  const tip = plot.querySelector("output");
  const lines = [...plot.querySelectorAll("[data-name]")].map(path => {
    const points = [], numbers = path.getAttribute("d").match(/\\d+/g).map(Number);
    for (let i = 0; i < numbers.length; i += 2)
      points.push([numbers[i] / 1000, 1 - numbers[i + 1] / 10000]);
    return [path.dataset.name, points];
  });
  plot.onpointermove = plot.onpointerdown = event => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    const near = points => points.reduce((a, b) =>
      Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
    const [x] = near(lines.map(line => near(line[1])));
    const rows = lines.map(([name, points]) => {
      const y = near(points)[1], value = isLog ? y0 * (y1 / y0) ** y : y0 + (y1 - y0) * y;
      return name + "  " + Number(value.toPrecision(4));
    });
    const step = Math.round(Number((x0 + (x1 - x0) * x).toPrecision(3)));
    tip.textContent = ["step " + step.toLocaleString("en"), ...rows].join("\\n");
    tip.style = x < 0.5 ? `left:${x * 100}%` : `right:${100 - x * 100}%`;
  };
  plot.onpointerleave = () => { tip.textContent = ""; };
}
"""


class Html(str):
    """Text that is HTML already, so that `escape` leaves it as it is."""


def escape(value: object, max_characters: int = 300) -> str:
    """Return a value as text that is safe in HTML and in a quoted attribute.

    Replace characters that are not printable, such as those that reverse the direction of text, and
    cut a text that is longer than `max_characters`.
    """
    if isinstance(value, Html):
        return value
    text = str(value)
    text = text if len(text) <= max_characters else f"{text[:max_characters]} ..."
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return html.escape(text, quote=True)


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with escaped cells, in a box with its own scroll bar; "" without rows."""
    lines = [("th", head), *(("td", row) for row in rows[:MAX_ROWS])]
    texts = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in lines]
    body = "".join(f"<tr>{text}</tr>" for text in texts if text)
    rest = f"<p>Rows left out: {len(rows) - MAX_ROWS}.</p>" * (len(rows) > MAX_ROWS)
    return f'<div class="scroll"><table>{body}</table></div>{rest}' if rows else ""


def page(title: str, body: str) -> str:
    """Return the whole page."""
    digest = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none';"
    policy += f" form-action 'none'; script-src 'sha256-{digest}'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>{body}\n<script>{SCRIPT}</script></body></html>\n"
    )

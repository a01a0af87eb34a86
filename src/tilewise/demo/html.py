"""The frame of a self-contained page: one file, no script, nothing loaded from anywhere; light and dark, on a desk and on a phone."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --ink: #1d2126; --soft: #5d6670; --grid: #dde1e5; --edge: #e3e6e9;
  --tilewise: #0f7fc4; --sdpa: #d9600e; --naive: #77808a; --other: #7b52ab; --good: #18794e; --bad: #c62a2f; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1c2024; --ink: #e8eaed; --soft: #a0a8b0; --grid: #343a40;
  --edge: #2c3238; --tilewise: #4db5f5; --sdpa: #ff9a52; --naive: #9aa3ad; --other: #b794e6; --good: #4cc38a; --bad: #ff6369; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 0.4rem; }
p, ul { max-width: 46rem; }
.verdict { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
.early { border-left: 4px solid var(--naive); padding-left: 0.8rem; }
.cards { display: grid; grid-template-columns: repeat(2, 1fr); gap: 0.8rem; margin: 1.4rem 0; }
@media (min-width: 46rem) { .cards { grid-template-columns: repeat(3, 1fr); } }
.card, figure, .scroll, pre { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.card { padding: 0.8rem 1rem; } .card b { display: block; font-size: 1.5rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 0.86rem; line-height: 1.4; display: block; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; margin: 1rem 0; }
figure { margin: 0; padding: 0.8rem 0.8rem 0.4rem; min-width: 0; } figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }
figure h3 { font-size: 0.98rem; margin: 0 0 0.3rem; } figcaption { color: var(--soft); font-size: 0.86rem; padding: 0.3rem 0; }
.plate { background: #ffffff; border-radius: 6px; padding: 0.2rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.8rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--edge); }
thead th { border-top: 0; color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
pre { padding: 0.8rem 1rem; overflow-x: auto; font-size: 0.82rem; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere; }
.soft, footer { color: var(--soft); font-size: 0.9rem; }
"""


def page(title: str, body: Iterable[str], description: str = "") -> str:
    """The document around `body`; `description` is what a program shows of it that links to it."""
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    about = f'<meta name="description" content="{escape(description)}">' if description else ""
    head = f'<meta charset="utf-8">{viewport}{about}<title>{escape(title)}</title><style>{STYLE}</style>'
    content = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{content}\n</body></html>\n'


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, style: str = "") -> str:
    return f"<p{_class(style)}>{escape(text)}</p>"


def bullets(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def continued(begin: str, rest: str) -> str:
    """Text, and what was made to follow it."""
    return f'<pre><span class="soft">{escape(begin)}</span>{escape(rest)}</pre>'


def download(text: str, name: str, kind: str, content: bytes) -> str:
    """A link to a file that is in the page itself."""
    return f'<p><a download="{escape(name)}" href="data:{kind};base64,{b64encode(content).decode()}">{escape(text)}</a></p>'


def cards(items: Iterable[tuple[str, str]]) -> str:
    """Big numbers with what they say under them."""
    each = (f'<div class="card"><b>{escape(number)}</b><span>{escape(text)}</span></div>' for number, text in items)
    return f'<div class="cards">{"".join(each)}</div>'


def figure(title: str, svg: str, caption: str = "", plate: bool = False) -> str:
    """An inline SVG with a title and a caption; `plate` puts it on white, for pictures with colours of their own."""
    inner = f'<div class="plate">{svg}</div>' if plate else svg
    return f"<figure><h3>{escape(title)}</h3>{inner}<figcaption>{escape(caption)}</figcaption></figure>"


def figures(items: Iterable[str]) -> str:
    """Figures side by side where there is room."""
    return f'<div class="charts">{"".join(items)}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself where it is wider than the page."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""

"""An explanation of a runner as one HTML page that opens offline: tables and pictures, nothing loaded, no script."""

from html import escape
from string import Template
from typing import Final

from .records import RunnerExplanation
from .svg import FONT, STYLE, clean, pictures
from .tables import Table, cell_text, is_number, tables_of

_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style
body{max-width:1440px;margin:0 auto;padding:16px 24px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,'Segoe UI',Roboto,'Liberation Sans',sans-serif}
h1{overflow-wrap:anywhere}h2{font-size:18px;margin:32px 0 4px}p{max-width:90ch;color:var(--muted)}
.wide{overflow-x:auto}.wide svg{display:block;max-width:100%;min-width:860px;height:auto}
table{border-collapse:collapse;font-size:13px}th{text-align:left;color:var(--muted);vertical-align:bottom}
th,td{padding:5px 16px 5px 0;border-bottom:1px solid var(--rule)}
td{vertical-align:top;max-width:60ch;overflow-wrap:break-word}td:first-child{white-space:nowrap;font-family:$font}.number{text-align:right;white-space:nowrap}
pre{background:var(--panel);padding:10px 14px;overflow-x:auto;font:13px/1.4 $font}
@media print{body{font-size:11px;max-width:none}.wide,pre{overflow:visible}.wide svg{min-width:0}tr{break-inside:avoid}}
</style>
</head>
<body>
<h1>$title</h1>
<h2 id="fills">What a step does</h2>
<p>A box for each step, in the plan's order, as wide as it has calls; a dashed one has none of its own in most steps.
The frame is the graph and what it does. The strip below has the same steps, as wide as the bytes that they move.
Neither is measured time.</p>
<div class="wide">$fills</div>
<h2 id="memory">Memory over a step</h2>
<p>Addresses run downwards, phases of one step to the right. A slot is coloured while its value counts, and pale where
its bytes are only held. Heights grow with the logarithm of bytes; what follows a plus sign is what alignment costs.</p>
<div class="wide">$memory</div>
$tables
</body>
</html>
""")


def html(explanation: RunnerExplanation) -> str:
    """The page, light or dark as its reader prefers."""
    return _PAGE.substitute(
        title=_escaped(f"{explanation.kind} over {explanation.declaration.declaration}"),
        style=STYLE,
        font=FONT,
        tables="\n".join(map(_section, tables_of(explanation))),
        **pictures(explanation),
    )


def _section(table: Table) -> str:
    columns = {name: ' class="number"' if is_number(table, name) else "" for name in (table.rows or [{}])[0]}
    head = "".join(f'<th scope="col"{number}>{_escaped(name)}</th>' for name, number in columns.items())
    body = "\n".join(
        f"<tr>{''.join(f'<td{number}>{_escaped(cell_text(row[name]))}</td>' for name, number in columns.items())}</tr>"
        for row in table.rows
    )
    rows = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    text = f"<pre>{_escaped(table.text)}</pre>" if table.text else ""
    return f"<h2>{_escaped(table.title)}</h2>\n{rows if table.rows else ''}{text}"


def _escaped(text: str) -> str:
    return escape(clean(text))

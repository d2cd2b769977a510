"""Colours and type of the pictures and of the page, light and dark; on paper always light."""

from typing import Final

KINDS: Final = ("copied", "parameter", "computed", "constant", "staged", "output")
"""Kinds of slots with a colour of their own, those of the mermaid diagram; others are drawn as what lies outside."""

MONO: Final = "ui-monospace,'DejaVu Sans Mono','Liberation Mono',Menlo,Consolas,monospace"

_LIGHT: Final = (
    "--ink:#1b2330;--muted:#5b6675;--rule:#d3d9e1;--panel:#f5f7fa;--page:#fff;--wire:#93a0b0;--accent:#0b62b8;"
    "--outside:#eceff3;--outside-line:#7f8a98;--copied:#dcebfa;--copied-line:#3b78b5;--parameter:#d5efef;"
    "--parameter-line:#2f8a8a;--computed:#e4f3dc;--computed-line:#5a9a3a;--constant:#f6f0d8;--constant-line:#b09a3c;"
    "--staged:#fae3d4;--staged-line:#c2703d;--output:#efe0f5;--output-line:#8a4fa8;--upload:#f6dfe6;"
    "--upload-line:#b64a72;--kernel:#fbe6b8;--kernel-line:#b58414;--graph:#dfe1fb;--graph-line:#5257c4;"
    "--reset:#e8eaee;--reset-line:#76808e;--free:#eef1f5"
)
_DARK: Final = (
    "--ink:#e7ebf1;--muted:#9aa6b5;--rule:#333d4a;--panel:#1a212b;--page:#11161d;--wire:#66727f;--accent:#69b1ff;"
    "--outside:#262e39;--outside-line:#8c98a7;--copied:#16324d;--copied-line:#6ba5dc;--parameter:#123c3c;"
    "--parameter-line:#5dbdbd;--computed:#1f3a16;--computed-line:#86c566;--constant:#3b3413;--constant-line:#d2ba58;"
    "--staged:#472915;--staged-line:#e29561;--output:#3a2346;--output-line:#c18bdc;--upload:#45202e;"
    "--upload-line:#e0809f;--kernel:#43330c;--kernel-line:#e3b348;--graph:#25285a;--graph-line:#9a9ef0;"
    "--reset:#272e38;--reset-line:#97a1af;--free:#1f2731"
)
_FILLED: Final = (*KINDS, "outside", "upload", "kernel", "graph", "reset")

PICTURE: Final = "".join(
    (
        f"svg.slotgraph{{{_LIGHT};font-family:{MONO};background:var(--page)}}",
        f"@media screen and (prefers-color-scheme:dark){{svg.slotgraph{{{_DARK}}}}}",
        "svg.slotgraph text{fill:var(--ink)}svg.slotgraph .faint{fill:var(--muted)}",
        "svg.slotgraph .strong{font-weight:600}",
        *(f"svg.slotgraph .{kind}{{fill:var(--{kind});stroke:var(--{kind}-line)}}" for kind in _FILLED),
        "svg.slotgraph .wire{fill:none;stroke:var(--wire)}svg.slotgraph .tap{fill:var(--computed-line);stroke:none}",
        "svg.slotgraph .bus{fill:none;stroke:var(--computed-line)}svg.slotgraph .tip{fill:var(--wire);stroke:none}",
        "svg.slotgraph .dashed{stroke-dasharray:4 3}svg.slotgraph .rule{fill:none;stroke:var(--rule)}",
        "svg.slotgraph .held{fill:var(--free);stroke:var(--rule)}svg.slotgraph .gap{fill:var(--wire);stroke:none}",
        "svg.slotgraph .bar{fill:var(--accent);stroke:none}",
        "svg.slotgraph .row:hover .wire,svg.slotgraph .row:hover .bus{stroke:var(--accent);stroke-width:2.2}",
        "svg.slotgraph .row:hover .tip,svg.slotgraph .row:hover .tap{fill:var(--accent)}",
        "svg.slotgraph .row:hover .node{stroke:var(--accent);stroke-width:2.2}",
    )
)
"""What a picture brings along, so that it is the same in a page and in a file of its own."""

PAGE: Final = "".join(
    (
        f":root{{{_LIGHT};color-scheme:light}}",
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK};color-scheme:dark}}}}",
        "*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);",
        "font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif}",
        "main,header{max-width:1440px;margin:0 auto;padding:0 24px}header{padding-top:32px}",
        "h1{font-size:28px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}",
        "h2{font-size:20px;margin:40px 0 4px;padding-top:12px;border-top:1px solid var(--rule)}",
        "h3{font-size:15px;margin:20px 0 4px}p{margin:4px 0 10px;max-width:78ch}.faint{color:var(--muted)}",
        f"code,pre,.mono{{font-family:{MONO};font-size:13px}}",
        ".facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:18px 0}",
        ".fact{background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:8px 12px}",
        ".fact b{display:block;font-size:20px;line-height:1.3;overflow-wrap:anywhere}",
        ".fact span{color:var(--muted);font-size:13px}",
        "nav a{color:var(--accent);margin-right:16px;text-decoration:none}nav a:hover{text-decoration:underline}",
        ".picture,.table{overflow-x:auto;margin:10px 0 16px}",
        ".picture svg{display:block;max-width:100%;min-width:860px;height:auto}",
        ".keys>span{display:inline-block;margin-right:22px}",
        "table{border-collapse:collapse;font-size:13px;min-width:50%}",
        "th{text-align:left;font-weight:600;color:var(--muted)}",
        "th,td{padding:5px 16px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}th{vertical-align:bottom}",
        "td{overflow-wrap:break-word;max-width:52ch}td:last-child{max-width:110ch}td.name{white-space:nowrap}",
        ".number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}",
        "pre{background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:10px 14px;",
        "overflow-x:auto;margin:6px 0 12px}summary{cursor:pointer;color:var(--accent)}",
        "footer{max-width:1440px;margin:40px auto 32px;padding:0 24px;color:var(--muted);font-size:13px}",
        ".key{display:inline-block;width:11px;height:11px;border:1px solid;border-radius:3px;margin-right:7px}",
        *(f".key.{kind}{{background:var(--{kind});border-color:var(--{kind}-line)}}" for kind in _FILLED),
        "@media print{body{font-size:11px}main,header,footer{max-width:none;padding:0}nav{display:none}",
        ".picture,.table{overflow:visible}.picture svg{min-width:0}h2{break-after:avoid}",
        "tr,.fact,pre{break-inside:avoid}details::details-content{content-visibility:visible;block-size:auto}}",
    )
)

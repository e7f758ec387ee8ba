"""The style sheet of the report: light, dark, on paper and on a phone."""

from __future__ import annotations

from typing import Final

__all__ = ("STYLE",)

_LIGHT: Final = """
--back: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #5b6675; --line: #d9dee5;
--main: #2563a8; --fill: #dbe8f6; --good: #1b7f4b; --warn: #9a5b00; --bad: #b3261e;
color-scheme: light;"""

STYLE: Final = f"""
:root {{{_LIGHT}}}
@media (prefers-color-scheme: dark) {{ :root {{
--back: #12161c; --card: #1b2129; --text: #e4e9f0; --soft: #9aa6b5; --line: #333d4a;
--main: #74b0f0; --fill: #24405f; --good: #5fcf95; --warn: #f0b35a; --bad: #ff8a80;
color-scheme: dark; }} }}
@media print {{ :root {{{_LIGHT} --back: #fff; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--back); color: var(--text);
font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }}
h1 {{ font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.05rem; margin: 0 0 .6rem; }}
h3 {{ font-size: .95rem; margin: 1rem 0 .4rem; }}
p {{ margin: .5rem 0 0; overflow-wrap: anywhere; }}
header p, .note, figcaption span, .axis {{ color: var(--soft); }}
section, .tiles li {{ background: var(--card); border: 1px solid var(--line);
border-radius: 10px; }}
section {{ padding: 1rem 1.1rem; margin-top: 1rem; break-inside: avoid; }}
.badge {{ font-size: .8rem; font-weight: 600; vertical-align: middle; padding: .15rem .6rem;
border-radius: 1rem; border: 1px solid currentcolor; color: var(--bad); }}
.badge.done {{ color: var(--good); }}
.badge.drained {{ color: var(--warn); }}
.error {{ border-color: var(--bad); }}
.error h2, .bad {{ color: var(--bad); }}
.warn {{ color: var(--warn); }}
pre {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
pre, code {{ font: .86em/1.5 ui-monospace, monospace; }}
.tiles {{ list-style: none; display: grid; gap: .7rem; margin: 1rem 0 0; padding: 0;
grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); }}
.tiles li {{ padding: .6rem .9rem; }}
.tiles b {{ display: block; font-size: 1.45rem; line-height: 1.3;
font-variant-numeric: tabular-nums; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th {{ text-align: left; font-weight: 600; color: var(--soft); }}
th, td {{ padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
vertical-align: top; }}
td {{ white-space: nowrap; }}
.wrap {{ white-space: normal; }}
.long {{ white-space: normal; overflow-wrap: anywhere; min-width: 14rem; width: 60%; }}
.number {{ text-align: right; }}
tbody tr:last-child td {{ border-bottom: 0; }}
#graph {{ display: block; margin: 0 auto; max-width: 100%; height: auto; }}
#graph text {{ text-anchor: middle; fill: var(--soft); font-size: 13px; }}
#graph .name {{ fill: var(--text); font-size: 14px; font-weight: 600; }}
#graph .count {{ fill: var(--text); font-variant-numeric: tabular-nums; }}
#graph .deadly {{ fill: var(--bad); }}
.stage {{ fill: var(--fill); stroke: var(--main); }}
.stage.bad {{ stroke: var(--bad); }}
.edge, .dead {{ stroke: var(--soft); }}
.tip {{ fill: var(--soft); }}
figure {{ margin: .6rem 0 0; }}
figcaption {{ display: flex; flex-wrap: wrap; gap: 0 1rem;
justify-content: space-between; }}
.plot {{ display: block; width: 100%; height: 4rem; border-bottom: 1px solid var(--line); }}
.plot path {{ fill: var(--fill); stroke: var(--main); stroke-width: 1.5;
vector-effect: non-scaling-stroke; }}
.axis {{ display: flex; justify-content: space-between; margin-top: .2rem;
font-size: .85rem; font-variant-numeric: tabular-nums; }}
@media (max-width: 40rem) {{ #graph {{ max-width: none; margin: 0; }} }}
@media print {{ main {{ max-width: none; padding: 0; }} .wide {{ overflow: visible; }}
td {{ white-space: normal; }} .long {{ min-width: 0; width: auto; }} }}
"""

"""Style of a report's pages."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #5b6570; --rule: #d9dee4; --card: #f6f8fa;
  --block-light: 42%; --run-0: #0072b2; --run-1: #d55e00; --run-2: #009e73; --run-3: #cc79a7; --run-4: #b58900;
  --run-5: #3aa0d8; --run-6: #444; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e6e9ed; --soft: #9aa5b1; --rule: #333a42;
  --card: #1d2228; --block-light: 65%; --run-0: #56b4e9; --run-1: #ff8c42; --run-2: #2dc99b; --run-3: #e6a3c6;
  --run-4: #f0e442; --run-5: #7f9cff; --run-6: #ccc; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 12px 16px 32px; }
h1 { font-size: 1.5rem; margin: .6em 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.6em 0 .4em; overflow-wrap: anywhere; }
p { margin: .3em 0; }
.note, h1 + p { color: var(--soft); font-size: .87rem; }
.cards, .charts { display: grid; gap: 14px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 14px; }
.card h2 { margin: 0 0 .4em; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px 14px; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0; }
figcaption { font-size: .9rem; font-weight: 600; }
figure > svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--rule); stroke-width: 1; fill: none; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.dots { fill: none; stroke-width: 6; stroke-linecap: round; }
.band { stroke: none; opacity: .18; }
.start { stroke: var(--c); stroke-width: 1; stroke-dasharray: 3 3; }
.stage { stroke: var(--c); stroke-width: 1; }
.skip { fill: var(--c); }
.save { stroke: var(--c); stroke-width: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .87rem; }
.key { display: inline-flex; align-items: center; gap: 6px; }
.swatch { width: 24px; height: 10px; flex: none; stroke-width: 3; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { border: 1px solid var(--rule); padding: 3px 8px; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; min-width: 6em; }
@media (max-width: 600px) {
  .cards, .charts { grid-template-columns: minmax(0, 1fr); }
  svg text { font-size: 14px; }
}
"""
"""One column below 600 px; tables alone scroll sideways, within themselves."""

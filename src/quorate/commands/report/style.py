"""The style sheet of a report: light and dark, wide and narrow."""

from __future__ import annotations

# Colours of curves distinguishable with any colour vision (after Okabe and Ito, 2008).
STYLE_SHEET = """
:root {
  --ink: #1f2328; --muted: #5d6672; --grid: #dfe3e8; --page: #ffffff; --card: #f6f8fa;
  --accent: #0b6bcb; --second: #c2410c; --good: #1a7f37; --bad: #cf222e; --warn: #9a6700;
  --starting: #8b949e; --waiting: #d0d7de; --fetching: #e0a800; --forward: #2f81d6;
  --backward: #0b8a6a; --pushing: #b65fa0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --muted: #9aa4af; --grid: #2d333b; --page: #0f1318; --card: #171c22;
    --accent: #58a6ff; --second: #ff9d5c; --good: #3fb950; --bad: #ff6b62; --warn: #d8a32a;
    --starting: #6e7681; --waiting: #3b434d; --fetching: #d4a72c; --forward: #4a9df0;
    --backward: #2eb08b; --pushing: #d17fbd;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-size: 15px;
}
main, footer { max-width: 1040px; margin: 0 auto; padding: 0 24px; }
header { margin: 32px 0 20px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 10px; overflow-wrap: anywhere; }
section { margin: 36px 0 0; }
p { margin: 8px 0; }
code {
  font: 0.87em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere;
}
a { color: var(--accent); }
small, .sub, .note, .muted, footer { color: var(--muted); }
.sub { margin: 2px 0; overflow-wrap: anywhere; }
.note { font-size: 13px; }
.remark { border-left: 3px solid var(--warn); padding: 2px 12px; margin: 14px 0; }
footer { padding: 28px 24px 36px; font-size: 13px; }
.state {
  display: inline-block; font-size: 13px; font-weight: 600; vertical-align: middle;
  border: 1px solid currentColor; border-radius: 99px; padding: 1px 10px; margin-left: 6px;
}
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.accent { color: var(--accent); }
.letter {
  display: inline-block; min-width: 1.5em; text-align: center; border-radius: 4px;
  color: var(--page); background: var(--accent); font-size: 0.85em;
}
.letter.b { background: var(--second); }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 1px;
  margin: 0 0 16px; background: var(--card); border: 1px solid var(--grid); border-radius: 8px;
  overflow: hidden;
}
.tiles > div { padding: 10px 14px; box-shadow: 1px 1px 0 var(--grid); }
.tiles dt { color: var(--muted); font-size: 12.5px; overflow-wrap: anywhere; }
.tiles dd { margin: 0; font-size: 19px; font-variant-numeric: tabular-nums; }
.tiles dd { overflow-wrap: anywhere; line-height: 1.35; }
.tiles small { display: block; font-size: 12.5px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; }
tr { border-bottom: 1px solid var(--grid); }
tr:last-child { border-bottom: 0; }
th { font-weight: 500; color: var(--muted); white-space: nowrap; }
.n { text-align: right; white-space: nowrap; }
.facts { width: 100%; } .facts th { width: 1%; padding-right: 22px; }
.facts td { overflow-wrap: anywhere; }
.differ td { min-width: 8em; }
.events td:last-child { min-width: 20em; overflow-wrap: anywhere; }
.events { width: 100%; } .kind { white-space: nowrap; }
tr:target { background: var(--card); outline: 2px solid var(--accent); }
.workers { width: 100%; }
.bar { width: 40%; min-width: 160px; }
.bar div { display: flex; height: 14px; margin-top: 3px; border-radius: 3px; overflow: hidden; }
.bar i { display: block; height: 100%; }
i.starting { background: var(--starting); } i.waiting { background: var(--waiting); }
i.fetching { background: var(--fetching); } i.forward { background: var(--forward); }
i.backward { background: var(--backward); } i.pushing { background: var(--pushing); }
.key {
  display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; padding: 0; margin: 4px 0 8px;
  font-size: 13px; color: var(--muted);
}
.key b { font-weight: 400; } .key b.muted { color: var(--muted); }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.chart svg { display: block; width: 100%; height: auto; }
.chart svg text { font-family: inherit; }
.chart.narrow { display: none; }
details { margin: 12px 0 0; } summary { cursor: pointer; color: var(--muted); font-size: 13.5px; }
header ul { padding-left: 20px; margin: 10px 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 32px; }
.pair > div { min-width: 0; }
section + .pair { margin-top: 36px; }
.pair .events tr { display: grid; grid-template-columns: auto auto 1fr; padding: 4px 0; }
.pair .events td { padding: 0 12px 0 0; }
.pair .events td:last-child { grid-column: 1 / -1; min-width: 0; }
.pair .events td:nth-child(2), .pair .events tr:first-child { display: none; }
.pair .tiles { grid-template-columns: repeat(auto-fill, minmax(120px, 1fr)); }
@media (max-width: 760px) {
  main, footer { padding-left: 14px; padding-right: 14px; }
  header { margin-top: 20px; }
  h1 { font-size: 22px; }
  .pair { grid-template-columns: minmax(0, 1fr); }
  .tiles, .pair .tiles { grid-template-columns: repeat(auto-fill, minmax(136px, 1fr)); }
  .events tr { display: grid; grid-template-columns: auto auto 1fr; padding: 4px 0; }
  .events td { padding: 0 12px 0 0; }
  .events td:last-child { grid-column: 1 / -1; min-width: 0; }
  .events td:nth-child(2), .events tr:first-child { display: none; }
  .chart.wide { display: none; } .chart.narrow { display: block; }
}
"""

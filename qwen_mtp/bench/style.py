"""The style sheet of the page: light and dark, wide and narrow."""

STYLE = """
:root{--page:#f6f7f9;--card:#fff;--ink:#1a2029;--soft:#5b6675;--line:#dfe3e8;--good:#12794f;
--bad:#b3261e;--c0:#2f6fd0;--c1:#15946b;--c2:#c98a12;--c3:#8a4fc7;--c4:#c2456b;--c5:#5d6b7a}
@media (prefers-color-scheme:dark){:root{--page:#12161c;--card:#1b2129;--ink:#e8ecf1;
--soft:#9aa6b4;--line:#303945;--good:#4cc38a;--bad:#ff8077;--c0:#6ea8ff;--c1:#3fc795;
--c2:#e9b44c;--c3:#bb8cf0;--c4:#f07c9f;--c5:#93a1b1}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 48px}
header h1{font-size:26px;margin:0 0 2px}
header p,.card p,figure p{color:var(--soft);margin:0}
section{margin-top:22px}
section>h2{font-size:18px;margin:30px 0 10px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.card,figure{background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:12px 14px}
.card h2{font-size:12.5px;font-weight:600;color:var(--soft);margin:0}
.card b{display:block;font-size:27px;font-weight:650;letter-spacing:-.01em;line-height:1.3}
.card small{font-size:14px;font-weight:500;color:var(--soft);margin-left:5px}
.card p{font-size:12.5px}
.good b{color:var(--good)}.bad b{color:var(--bad)}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:14px}
figure{margin:0;padding:14px 16px 12px;display:flex;flex-direction:column}
figcaption{display:flex;flex-wrap:wrap;align-items:baseline;justify-content:space-between;
gap:2px 14px}
h3{font-size:15px;margin:0}
figure ul{list-style:none;display:flex;flex-wrap:wrap;gap:2px 12px;margin:0;padding:0;
font-size:12.5px;color:var(--soft)}
figure i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
figure p{font-size:12.5px;margin-top:auto}
svg{width:100%;height:auto;margin:8px 0 4px}
svg text{font-size:11.5px;fill:var(--soft);text-anchor:middle}
svg .end{text-anchor:end}svg .start{text-anchor:start;fill:var(--ink);paint-order:stroke;
stroke:var(--card);stroke-width:4px}
svg .value{fill:var(--ink)}
.grid{stroke:var(--line);stroke-width:1}
.base{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 4}
svg .line{fill:none;stroke-width:2.2}
.s0{fill:var(--c0);stroke:var(--c0)}.s1{fill:var(--c1);stroke:var(--c1)}
.s2{fill:var(--c2);stroke:var(--c2)}.s3{fill:var(--c3);stroke:var(--c3)}
.s4{fill:var(--c4);stroke:var(--c4)}.s5{fill:var(--c5);stroke:var(--c5)}
rect{stroke:none!important}
i.s0{background:var(--c0)}i.s1{background:var(--c1)}i.s2{background:var(--c2)}
i.s3{background:var(--c3)}i.s4{background:var(--c4)}i.s5{background:var(--c5)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:5px 8px;text-align:right;border-top:1px solid var(--line);
font-variant-numeric:tabular-nums;white-space:nowrap}
thead th{border-top:0;color:var(--soft);font-weight:600}
th:first-child,td:first-child,td.text{text-align:left}
tbody th{font-weight:600;color:var(--soft);background:var(--page)}
td.text{white-space:normal}
"""

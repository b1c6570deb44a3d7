"""The look of pages: system fonts, black on white, tables that scroll where they are wider than the page."""

STYLE = """\
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif;
       color: #1b1b1b; background: #fff; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
.lead { color: #444; margin-top: 0; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: #444; font-size: .92rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0;
         border-bottom: 1px solid #ddd; overflow-wrap: anywhere; }
th { font-weight: 500; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere;
      font: 14px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
b { font-weight: 700; }
"""

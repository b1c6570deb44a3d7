"""The HTML of a training report: one page, no scripts, nothing loaded from elsewhere. Jinja escapes every value."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
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
th { font-weight: 500; width: 38%; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere;
      font: 14px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
b { font-weight: 700; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="lead">{{ summary }}</p>
{% for picture in pictures %}
<h2>{{ picture.title }}</h2>
<figure>{{ picture.svg | safe }}<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
<h2>A sample</h2>
<p class="lead">{{ sample_note }}</p>
<pre><b>{{ prompt }}</b>{{ sample }}</pre>
{% for table in tables %}
<h2>{{ table.title }}</h2>
<table>
{% for name, value in table.rows.items() %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{% endfor %}
<h2>Commands</h2>
<p class="lead">Train the same run again:</p>
<pre>{{ command }}</pre>
<p class="lead">Write with the trained model:</p>
<pre>{{ generate_command }}</pre>
</body>
</html>
"""

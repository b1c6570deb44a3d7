"""The HTML of a training report: one page, no scripts, nothing loaded from elsewhere. Jinja escapes every value."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
{{ style | safe }}table.pairs th { width: 38%; }
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
<table class="pairs">
{% for name, value in table.rows.items() %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{% endfor %}
<h2>Commands</h2>
<p class="lead">Train the same run again:</p>
<pre>{{ command }}</pre>
{% if generate_command %}
<p class="lead">Write with the trained model:</p>
<pre>{{ generate_command }}</pre>
{% endif %}
</body>
</html>
"""

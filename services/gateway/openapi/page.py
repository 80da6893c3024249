"""The description as one HTML page without scripts, fonts or anything else from elsewhere. Pure."""

import json
from html import escape
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
code { background: #f2f2f2; padding: 0 .2rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #eee; }
.method { text-transform: uppercase; color: #666; font-size: 80%; }
"""
BOUNDS = {
    "minimum": "from {}",
    "maximum": "to {}",
    "minLength": "{} characters or more",
    "maxLength": "up to {} characters",
    "minItems": "{} or more",
    "maxItems": "up to {}",
    "maxProperties": "up to {}",
}


def page_of(description: dict[str, Any]) -> str:
    """The whole page."""
    info = description["info"]
    operations = [
        _operation(method, path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    types = [_type(name, schema) for name, schema in sorted(description["components"]["schemas"].items())]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><p>{_text(info['description'])} The same for programs: "
        f'<a href="openapi.json">openapi.json</a>.</p>{"".join(operations)}<h2>Types</h2>{"".join(types)}</html>'
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = []
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        rows.append(f"<tr><th>takes<td>{_kind(schema)}")
    for status, response in operation["responses"].items():
        kinds = [f"{escape(media)}: {_kind(content['schema'])}" for media, content in response["content"].items()]
        rows.append(f"<tr><th>{escape(status)}<td>{_text(response['description'])}<br>{'<br>'.join(kinds)}")
    heading = f'<h2><span class="method">{escape(method)}</span> <code>{escape(path)}</code></h2>'
    return f"{heading}<p>{_text(operation['summary'])}.</p><table>{''.join(rows)}</table>"


def _type(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in required else ''}<td>{_kind(kind)}"
        for field, kind in schema.get("properties", {}).items()
    ]
    text = _text(schema.get("description", ""))
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{text}</p><table>{"".join(rows)}</table>'


def _kind(schema: dict[str, Any]) -> str:
    """A type in words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    words = [escape(str(schema.get("type", "anything")))]
    if isinstance(schema.get("items"), dict):
        words.append(f"of {_kind(schema['items'])}")
    if isinstance(schema.get("additionalProperties"), dict):
        words.append(f"of {_kind(schema['additionalProperties'])}")
    words += [bound.format(schema[name]) for name, bound in BOUNDS.items() if name in schema]
    if "contentSchema" in schema:
        words.append(_kind(schema["contentSchema"]))
    if "properties" in schema:
        words.append(
            "; ".join(f"<code>{escape(name)}</code>: {_kind(kind)}" for name, kind in schema["properties"].items())
        )
    if "description" in schema:
        words.append(f"<br>{_text(schema['description'])}")
    return " ".join(words)


def _text(text: str) -> str:
    """Plain text with code between backticks."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))

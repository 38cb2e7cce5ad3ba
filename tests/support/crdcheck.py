"""
What the API server does with a CRD and its objects, as far as our rules reach.

`structural_errors` checks a schema as the API server does when a CRD is applied. `Admission`
defaults, prunes and validates objects, CEL rules included; it can be plugged into the in-memory
cluster. Written from the documentation of structural schemas, apart from the code it checks.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import celpy
from celpy.adapter import json_to_cel

from memcluster import Admit, MemCluster
from modelpool_kube import errors
from modelpool_kube.kinds import Kind

Json = dict[str, Any]

_VALUE_KEYS = {
    "type",
    "description",
    "properties",
    "required",
    "items",
    "additionalProperties",
    "enum",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "default",
    "anyOf",
    "nullable",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-validations",
}
_TYPES = {"object", "array", "string", "integer", "boolean"}


def structural_errors(crd: Json) -> list[str]:
    """Return what keeps the API server from taking *crd*; empty when nothing does."""
    errors: list[str] = []
    for version in crd["spec"]["versions"]:
        schema = version["schema"]["openAPIV3Schema"]
        errors += _structural(schema, crd["spec"]["names"]["kind"], root=True)
        for column in version.get("additionalPrinterColumns", []):
            if column["type"] not in ("string", "integer", "number", "boolean", "date"):
                errors.append(f"column {column['name']}: type {column['type']}")
            if not column["jsonPath"].startswith(".metadata.") and not _find(
                schema, column["jsonPath"]
            ):
                errors.append(f"column {column['name']}: no field {column['jsonPath']}")
        scale = version["subresources"].get("scale", {})
        errors += [f"scale: no field {path}" for path in scale.values() if not _find(schema, path)]
    return errors


def _find(schema: Json, path: str) -> Json | None:
    for part in path.strip(".").split("."):
        found = schema.get("properties", {}).get(part)
        if found is None:
            return None
        schema = found
    return schema


def _structural(schema: Json, where: str, *, root: bool = False) -> Iterator[str]:
    for key in sorted(set(schema) - _VALUE_KEYS):
        yield f"{where}: {key} is forbidden"
    kind = schema.get("type")
    int_or_string = schema.get("x-kubernetes-int-or-string", False)
    if int_or_string:
        if kind is not None:
            yield f"{where}: type beside int-or-string"
        if schema.get("anyOf") != [{"type": "integer"}, {"type": "string"}]:
            yield f"{where}: int-or-string needs exactly the two types"
    elif "anyOf" in schema:
        yield f"{where}: anyOf is only for int-or-string"
    elif kind not in _TYPES:
        yield f"{where}: type {kind!r}"
    if "properties" in schema and "additionalProperties" in schema:
        yield f"{where}: properties and additionalProperties exclude each other"
    if kind == "object" and not root:
        free = schema.get("x-kubernetes-preserve-unknown-fields")
        if not (schema.get("properties") or "additionalProperties" in schema or free):
            if where.count(".") != 1 or not where.endswith(".metadata"):
                yield f"{where}: everything in it would be pruned"
    if kind == "array":
        if "items" not in schema:
            yield f"{where}: no items"
        if "maxItems" not in schema:
            yield f"{where}: no maxItems, rules would cost too much"
        if schema.get("x-kubernetes-list-type") == "map":
            item = schema["items"]
            for key in schema["x-kubernetes-list-map-keys"]:
                field = item.get("properties", {}).get(key)
                if field is None:
                    yield f"{where}: list key {key} is no field"
                elif key not in item.get("required", []) and "default" not in field:
                    yield f"{where}: list key {key} is neither required nor defaulted"
        elif "x-kubernetes-list-type" not in schema:
            yield f"{where}: no list type"
    if kind == "string" and not {"maxLength", "enum"} & set(schema) and where.count(".") > 1:
        yield f"{where}: no maxLength, rules would cost too much"
    if isinstance(schema.get("additionalProperties"), bool):
        yield f"{where}: additionalProperties must be a schema"
    elif "additionalProperties" in schema:
        if "maxProperties" not in schema:
            yield f"{where}: no maxProperties, rules would cost too much"
        yield from _structural(schema["additionalProperties"], f"{where}.{{}}")
    if "default" in schema:
        yield from (f"{where}: default: {each}" for each in _bounds(schema["default"], schema, ""))
    for key in schema.get("required", []):
        if key not in schema.get("properties", {}):
            yield f"{where}: required {key} is no field"
        elif "default" in schema["properties"][key]:
            yield f"{where}: {key} is required and has a default"
    for rule in schema.get("x-kubernetes-validations", []):
        yield from _rule_errors(rule, schema, where)
    for name, prop in schema.get("properties", {}).items():
        if not (root and name in ("apiVersion", "kind", "metadata")):
            yield from _structural(prop, f"{where}.{name}")
    if "items" in schema:
        yield from _structural(schema["items"], f"{where}[].")


def _rule_errors(rule: Json, schema: Json, where: str) -> Iterator[str]:
    for key in set(rule) - {"rule", "message", "messageExpression", "fieldPath", "reason"}:
        yield f"{where}: rule key {key}"
    if not rule["rule"].strip() or "\n" in rule["rule"]:
        yield f"{where}: a rule must be one line"
    if not rule.get("message") or "\n" in rule["message"] or len(rule["message"]) > 2048:
        yield f"{where}: a message must be one line of at most 2048 characters"
    path = rule.get("fieldPath")
    if path is not None and _find(schema, path) is None:
        yield f"{where}: fieldPath {path} is no field"


class Admission:
    """Defaults, prunes and validates the objects of one CRD, as the API server does."""

    def __init__(self, crd: Json) -> None:
        self.kind: str = crd["spec"]["names"]["kind"]
        self._schema: Json = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def filled(self, new: Json) -> Json:
        """Return the object pruned and defaulted, unchecked."""
        rest = {key: value for key, value in new.items() if key != "metadata"}
        filled = _defaulted(_pruned(rest, self._schema), self._schema)
        return {**filled, "metadata": new.get("metadata", {})}

    def admit(self, new: Json, old: Json | None = None) -> tuple[Json, list[str]]:
        """
        Return the object as it would be stored, and what is wrong with it.

        Rules are only looked at when types and bounds are right, as in the API server. Every
        error is ``path: message``.
        """
        stored = self.filled(copy.deepcopy(new))
        meta = stored.pop("metadata")
        errors = list(_bounds(stored, self._schema, ""))
        if not errors:
            whole = {**stored, "metadata": {"name": meta.get("name", "")}}
            before = None
            if old is not None:
                before = {**old, "metadata": {"name": old["metadata"]["name"]}}
            errors = list(_broken_rules(whole, before, self._schema, ""))
        return {**stored, "metadata": meta}, errors


def serve(cluster: MemCluster, crds: Iterable[Json], *, rules: bool = True) -> None:
    """
    Let *cluster* treat objects of *crds* as an API server does that serves them.

    Without *rules* they are only pruned and defaulted, which takes no time worth counting.
    """
    for crd in crds:
        cluster.admit[_kind_of(crd)] = _admit(Admission(crd), rules)


def _kind_of(crd: Json) -> Kind:
    spec = crd["spec"]
    return Kind(
        spec["group"],
        spec["versions"][0]["name"],
        spec["names"]["plural"],
        spec["names"]["kind"],
        namespaced=spec["scope"] == "Namespaced",
    )


def _admit(admission: Admission, rules: bool) -> Admit:
    def admit(new: Json, old: Json | None) -> Json:
        stored, wrong = admission.admit(new, old) if rules else (admission.filled(new), [])
        if wrong:
            name = new["metadata"].get("name")
            raise errors.Invalid(
                f'{admission.kind} "{name}" is invalid: {"; ".join(wrong)}',
                code=422,
                reason="Invalid",
            )
        return stored

    return admit


def rules_of(schema: Json, where: str = "") -> Iterator[tuple[str, Json]]:
    """Yield every rule with the path of the node it stands at."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield where, rule
    for name, prop in schema.get("properties", {}).items():
        yield from rules_of(prop, f"{where}.{name}")
    if "items" in schema:
        yield from rules_of(schema["items"], f"{where}[]")
    if "additionalProperties" in schema:
        yield from rules_of(schema["additionalProperties"], f"{where}{{}}")


def _pruned(value: Any, schema: Json) -> Any:
    if isinstance(value, dict):
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return value
        if "additionalProperties" in schema:
            return {k: _pruned(v, schema["additionalProperties"]) for k, v in value.items()}
        known = schema.get("properties", {})
        return {
            k: _pruned(v, known[k])
            for k, v in value.items()
            if k in known and not (v is None and not known[k].get("nullable"))
        }
    if isinstance(value, list) and "items" in schema:
        return [_pruned(item, schema["items"]) for item in value]
    return value


def _defaulted(value: Any, schema: Json) -> Any:
    if isinstance(value, dict):
        filled = dict(value)
        for name, prop in schema.get("properties", {}).items():
            if name not in filled and "default" in prop:
                filled[name] = copy.deepcopy(prop["default"])
            if name in filled:
                filled[name] = _defaulted(filled[name], prop)
        if "additionalProperties" in schema:
            extra = schema["additionalProperties"]
            filled = {k: _defaulted(v, extra) for k, v in filled.items()}
        return filled
    if isinstance(value, list) and "items" in schema:
        return [_defaulted(item, schema["items"]) for item in value]
    return value


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case _:
            return isinstance(value, int) and not isinstance(value, bool)


def _bounds(value: Any, schema: Json, where: str) -> Iterator[str]:
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if not (_is(value, "integer") or _is(value, "string")):
            yield f"{where}: must be a number or a string"
            return
    elif not _is(value, kind or "object"):
        yield f"{where}: must be of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: Unsupported value: {value!r}: one of {schema['enum']}"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where}: {value!r} should match {schema['pattern']}"
        if len(value) > schema.get("maxLength", len(value)):
            yield f"{where}: longer than {schema['maxLength']}"
        if len(value) < schema.get("minLength", 0):
            yield f"{where}: shorter than {schema['minLength']}"
    elif isinstance(value, int) and not isinstance(value, bool):
        if value < schema.get("minimum", value) or value > schema.get("maximum", value):
            yield f"{where}: {value} is outside {schema.get('minimum')}..{schema.get('maximum')}"
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)) or len(value) < schema.get(
            "minItems", 0
        ):
            yield f"{where}: {len(value)} items"
        keys = schema.get("x-kubernetes-list-map-keys")
        names = [tuple(i.get(k) for k in keys) for i in value] if keys else list(value)
        if (keys or schema.get("x-kubernetes-list-type") == "set") and any(
            names.count(name) > 1 for name in names
        ):
            yield f"{where}: Duplicate value"
        for number, item in enumerate(value):
            yield from _bounds(item, schema["items"], f"{where}[{number}]")
    elif isinstance(value, dict):
        if len(value) > schema.get("maxProperties", len(value)):
            yield f"{where}: {len(value)} entries"
        for key in schema.get("required", []):
            if key not in value:
                yield f"{where}.{key}: Required value"
        for key, item in value.items():
            if key in schema.get("properties", {}):
                yield from _bounds(item, schema["properties"][key], f"{where}.{key}")
            elif "additionalProperties" in schema:
                yield from _bounds(item, schema["additionalProperties"], f"{where}[{key}]")


_ENVIRONMENT = celpy.Environment()


@cache
def _program(expression: str) -> celpy.Runner:
    return _ENVIRONMENT.program(_ENVIRONMENT.compile(expression))


def evaluate(expression: str, **names: Any) -> Any:
    """Return the value of a CEL expression with *names* bound to JSON values."""
    return _evaluated(expression, json.dumps(names, sort_keys=True))


@cache
def _evaluated(expression: str, names: str) -> Any:
    # Remembered, because a test changes one field of an object and the rest stays the same.
    bound = {name: json_to_cel(value) for name, value in json.loads(names).items()}
    return _program(expression).evaluate(bound)


def _broken_rules(value: Any, old: Any, schema: Json, where: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        names = {"self": value}
        if re.search(r"\boldSelf\b", rule["rule"]):
            if old is None:
                continue  # a transition rule is for updates
            names["oldSelf"] = old
        if not evaluate(rule["rule"], **names):
            message = rule["message"]
            if "messageExpression" in rule:
                message = str(evaluate(rule["messageExpression"], **names))
            yield f"{where}{rule.get('fieldPath', '')}: {message}"
    if isinstance(value, Mapping):
        before = old if isinstance(old, Mapping) else {}
        for key, item in value.items():
            prop = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            if isinstance(prop, dict):
                yield from _broken_rules(item, before.get(key), prop, f"{where}.{key}")
    elif isinstance(value, list) and "items" in schema:
        keys = schema.get("x-kubernetes-list-map-keys")
        for number, item in enumerate(value):
            match = None
            if keys and isinstance(old, list):
                wanted = [item.get(key) for key in keys]
                match = next((o for o in old if [o.get(key) for key in keys] == wanted), None)
            yield from _broken_rules(item, match, schema["items"], f"{where}[{number}]")

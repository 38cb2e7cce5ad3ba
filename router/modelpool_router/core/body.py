"""
What the router must know of a request body: which model, and whether a stream is wanted.

Pure: bytes in, facts out. Only the top-level ``model`` and ``stream`` are ours; everything else is
checked to be JSON that all parsers read alike (`jsontext`) and forwarded byte for byte.
"""

from __future__ import annotations

import msgspec

from . import jsontext, multipart
from .jsontext import Text

__all__ = [
    "BadBody",
    "BodyFacts",
    "encode_name",
    "inspect_closely",
    "inspect_json",
    "inspect_multipart",
    "model_span",
    "multipart_model_span",
    "plain_facts",
]


_string = msgspec.json.Decoder(str)


class BadBody(ValueError):
    """
    The caller's body cannot be accepted.

    Attributes:
        code: ``invalid_json``, ``duplicate_key``, ``missing_required_parameter``,
            ``invalid_type`` or ``invalid_framing`` (a broken multipart body).
        message: for people; quotes nothing of the body.
        param: the top-level name at fault, if there is one.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class BodyFacts(msgspec.Struct, frozen=True):
    """What a body asks for. *model* is None only where a path does not need one."""

    model: str | None
    stream: bool


def inspect_json(data: Text, *, model_required: bool = True) -> BodyFacts:
    """
    Check a whole JSON body and read ``model`` and ``stream``.

    Costs some microseconds for 1 KB and a few milliseconds for 4 MB, and no memory that grows with
    what the document contains.

    Args:
        data: the complete body, decoded from any Content-Encoding.
        model_required: False for paths whose bodies have no ``model``.

    Raises:
        BadBody: with the first of: not JSON, duplicate key, not an object, wrong model, wrong
            stream.
    """
    plain = plain_facts(data) if isinstance(data, bytes) else None
    if plain is not None:
        return BodyFacts(*plain)
    return inspect_closely(data, model_required=model_required)


def inspect_closely(data: Text, *, model_required: bool = True) -> BodyFacts:
    """Do what `inspect_json` does, for a body that `plain_facts` was asked about in vain."""
    try:
        wanted = jsontext.top_level(data)
    except jsontext.NotJson as error:
        raise BadBody("invalid_json", f"The body is not valid JSON: {error}.") from None
    except jsontext.DuplicateKey as error:
        raise BadBody(
            "duplicate_key",
            "A key appears more than once at the top level of the body; send it once.",
            error.key,
        ) from None
    except jsontext.NotAnObject:
        raise BadBody("invalid_type", "The body must be a JSON object.") from None
    return BodyFacts(model=_model(wanted.model, model_required), stream=_stream(wanted.stream))


def plain_facts(data: bytes) -> tuple[str, bool] | None:
    """Return ``model`` and ``stream`` of an ordinary short body; None if it takes a closer look."""
    plain = jsontext.plain_object(data)
    if plain is None:
        return None
    name, stream = plain.get("model"), plain.get("stream")
    if type(name) is str and name and (stream is None or type(stream) is bool):
        return name, stream is True
    return None


def inspect_multipart(content_type: str, data: Text, *, model_required: bool = True) -> BodyFacts:
    """
    Check the frame of a multipart/form-data body and read its ``model`` and ``stream`` fields.

    Args:
        content_type: value of the Content-Type header; its boundary counts.
        data: the complete body.
        model_required: as in `inspect_json`.

    Raises:
        BadBody: the frame is broken, a field of ours is there twice or is not plain text.
    """
    try:
        fields = multipart.text_fields(content_type, data, wanted=frozenset({"model", "stream"}))
    except multipart.BadMultipart as error:
        raise BadBody("invalid_framing", f"The multipart body is malformed: {error}.") from None
    except multipart.DuplicateField as error:
        raise BadBody(
            "duplicate_key",
            "A form field appears more than once in the body; send it once.",
            error.name,
        ) from None
    except multipart.NotText as error:
        raise BadBody(
            "invalid_type", "This form field must be short plain text.", error.name
        ) from None
    model = fields.get("model")
    if not model and (model_required or model is not None):
        raise _missing_model()
    stream = fields.get("stream", "").lower()
    if stream not in ("", "true", "false", "1", "0"):
        raise BadBody("invalid_type", "The form field `stream` must be true or false.", "stream")
    return BodyFacts(model=model, stream=stream in ("true", "1"))


def model_span(data: Text) -> tuple[int, int]:
    """
    Return begin and end of the raw JSON value of ``model``, quotes included, in bytes.

    Only for a body that `inspect_json` accepted. Costs a second pass: for members with a
    ``servedModel`` alone.

    Raises:
        KeyError: the body has no ``model``.
    """
    return jsontext.value_span(data, "model")


def multipart_model_span(content_type: str, data: Text) -> tuple[int, int]:
    """
    Return begin and end of the value of the form field ``model``, in bytes.

    Only for a body that `inspect_multipart` accepted.

    Raises:
        KeyError: the body has no ``model``.
    """
    return multipart.field_span(content_type, data, "model")


def encode_name(name: str) -> bytes:
    """Return *name* as a JSON string, quotes included."""
    return msgspec.json.encode(name)


def _missing_model() -> BadBody:
    return BadBody("missing_required_parameter", "You must provide a `model` parameter.", "model")


def _model(raw: msgspec.Raw | None, required: bool) -> str | None:
    if raw is None:
        if required:
            raise _missing_model()
        return None
    try:
        name = _string.decode(raw)
    except msgspec.ValidationError:
        raise BadBody("invalid_type", "`model` must be a string.", "model") from None
    if not name:
        raise _missing_model()
    return name


def _stream(raw: msgspec.Raw | None) -> bool:
    if raw is None:
        return False
    word = bytes(raw)
    if word not in (b"true", b"false", b"null"):  # SDKs send null for "not given"
        raise BadBody("invalid_type", "`stream` must be a boolean.", "stream")
    return word == b"true"

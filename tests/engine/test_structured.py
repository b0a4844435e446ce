"""Structured output: every text has its form, and what cannot be enforced is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo import SamplingParams
from octavo.engine import GenerationFailed, NoTokenAllowed, StructuredOutputs
from octavo.engine.grammar import Grammars
from octavo.engine.llm import LLM
from octavo.errors import InvalidRequest
from octavo.models import LoadedModel
from tests.engine.helpers import idle, llm_on

SUITE = (
    Path(__file__).resolve().parents[3]
    / "shared" / "data" / "json-schema-test-suite" / "JSON-Schema-Test-Suite.tar.gz"
)  # fmt: skip
# What closes a value soon: the tiny model is random and would go on for ever.
CLOSERS = {"@": 18.0, '"': 12.0, "}": 15.0, "]": 15.0, ",": 8.0, ":": 8.0}


@pytest.fixture
def model(tiny: tuple[LoadedModel, Any]) -> LoadedModel:
    """The tiny model with an end-of-text token that is no text; its config names the letter A."""
    eos = tiny[0].tokenizer.eos_token_id
    assert eos is not None
    return dataclasses.replace(tiny[0], eos_token_ids=frozenset({eos}))


def byte_ids(model: LoadedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)


def closers(model: LoadedModel) -> dict[int, float]:
    bias = {byte_ids(model, text)[0]: value for text, value in CLOSERS.items()}
    return bias | dict.fromkeys(model.eos_token_ids, 25.0)


def valid(schema: Any, text: str) -> None:
    validator = jsonschema.Draft202012Validator
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Any of the keywords that are enforced, nested."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "format"]
    kinds += ["object", "array", "anyOf", "tuple", "ref"] if depth < 3 else []
    kind = rng.choice(kinds)
    if kind == "integer":
        low = rng.randint(-50, 50)
        return rng.choice(
            [{"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
             {"type": "integer", "exclusiveMinimum": low},
             {"type": "integer", "multipleOf": rng.randint(2, 9)}]
        )  # fmt: skip
    if kind == "number":
        return {"type": "number", "minimum": rng.randint(-9, 0), "exclusiveMaximum": rng.randint(1, 99)}
    if kind == "string":
        low = rng.randint(0, 3)
        return rng.choice(
            [{"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 9)},
             {"type": "string", "pattern": rng.choice(["^[a-f]{2,6}$", "^(yes|no)$", "^x[0-9]+y$"])}]
        )  # fmt: skip
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["a", "bc", 1, 2.5, None, True, [1], {"k": "v"}, "\u00e9\n"], 4)}
    if kind == "const":
        return {"const": rng.choice(["x", 7, None, [True, "y"], {"a": {"b": 1}}])}
    if kind == "format":
        formats = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname"]
        return {"type": "string", "format": rng.choice(formats)}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 3)}
    if kind == "tuple":
        items = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "ref":
        item = random_schema(rng, 3)
        if depth:
            return item
        reference = {"$ref": "#/$defs/format"}
        return {"$defs": {"format": item}, "type": "array", "items": reference, "maxItems": 3}
    names = rng.sample(["a", "name", "format", "long name", "\u00fc", "x1"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": rng.choice([False, False, {"type": "integer"}]),
    }


def generate_all(llm: LLM, schemas: list[Any], max_tokens: int) -> int:
    """Generate for each schema; every finished text is valid. Returns how many finished."""
    bias = closers(llm.engine.model)
    params = [
        SamplingParams(
            seed=seed, temperature=1.5, max_tokens=max_tokens, logit_bias=bias,
            structured_outputs=StructuredOutputs(json=schema),
        )
        for seed, schema in enumerate(schemas)
    ]  # fmt: skip
    outputs = llm.generate([[65, 66]] * len(schemas), params, use_tqdm=False)
    finished = 0
    for schema, output in zip(schemas, outputs, strict=True):
        sequence = output.outputs[0]
        if sequence.finish_reason == "stop":
            valid(schema, sequence.text)
            finished += 1
    return finished


def test_200_random_schemas(model: LoadedModel) -> None:
    """Two hundred nested schemas over every enforced keyword, many at once, some preempted on the way: each
    ends within the tokens given, and validates."""
    rng = random.Random(12)
    schemas = [random_schema(rng) for _ in range(200)]
    llm = llm_on(model, block_size=4, num_blocks=120, max_num_seqs=16)
    step = llm.engine.step

    def preempting() -> Any:
        deltas = step()
        if llm.engine.scheduler.running and rng.random() < 0.1:
            llm.engine.scheduler.preempt(rng.choice(llm.engine.scheduler.running))
        return deltas

    llm.engine.step = preempting  # type: ignore[method-assign]
    assert generate_all(llm, schemas, 400) == 200
    assert llm.engine.scheduler.stats.preemptions > 10
    idle(llm)


def suite_groups() -> list[dict[str, Any]]:
    """The groups of the public suite for the 2020-12 draft, optional formats among them."""
    groups = []
    with tarfile.open(SUITE) as archive:
        for member in archive:
            if "tests/draft2020-12/" in member.name and member.name.endswith(".json"):
                file = archive.extractfile(member)
                assert file is not None
                groups += [{**group, "file": member.name} for group in json.load(file)]
    return groups


@pytest.mark.skipif(not SUITE.is_file(), reason=f"{SUITE} is not there")
def test_public_suite(model: LoadedModel) -> None:
    """Each schema of the public suite is refused, or enforced: no instance that the suite calls invalid can
    be written under it (but for ECMAScript's own character classes: patterns have Rust's syntax). Outputs
    for the accepted ones validate."""
    grammars = Grammars(model.tokenizer, model.config.vocab_size, sorted(model.eos_token_ids))
    accepted, refused, escapes = [], 0, []
    for group in suite_groups():
        try:
            form = StructuredOutputs(json=group["schema"])
            grammars.compile(form)
        except InvalidRequest:
            refused += 1
            continue
        accepted.append(group)
        for test in group["tests"]:
            matcher = grammars.compile(form)
            tokens = byte_ids(model, json.dumps(test["data"], ensure_ascii=False))
            written = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            if written and not test["valid"]:
                escapes.append(group["file"])
    assert len(accepted) > 150
    assert refused > 150
    assert all("ecmascript-regex" in name for name in escapes)
    # Python's own validator cannot read \\p, and divides decimals as binary fractions.
    usual = [
        group["schema"] for group in accepted
        if "\\p{" not in json.dumps(group["schema"]) and "ecmascript" not in group["file"]
        and "0.0" not in json.dumps(group["schema"])
    ]  # fmt: skip
    assert generate_all(llm_on(model), usual, 120) > len(usual) * 0.6


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True}, {"not": {"type": "string"}},
        {"propertyNames": {"pattern": "a"}},
        {"contains": {"type": "integer"}}, {"if": {"type": "integer"}, "then": {"minimum": 3}},
        {"dependentRequired": {"a": ["b"]}}, {"type": "string", "format": "nonsense"},
        {"type": "string", "pattern": "^(?=a)b"}, {"$ref": "http://example.com/elsewhere"},
        {"type": "object", "properties": {"deep": {"items": {"unevaluatedProperties": False}}}},
        {"x-guidance": {"lenient": True}, "not": {"type": "string"}},
        {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "nonsense"}, {"type": "integer", "minimum": 5, "maximum": 3},
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(model: LoadedModel, schema: Any) -> None:
    """Unknown keywords, formats and constructs, also deep inside, and schemas that nothing satisfies; a
    schema cannot switch that off."""
    llm = llm_on(model)
    params = SamplingParams(structured_outputs=StructuredOutputs(json=schema))
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json cannot be enforced") as caught:
        llm.generate([1], params, use_tqdm=False)
    assert caught.value.param == "structured_outputs"
    assert llm.engine.scheduler.stats.admitted == 0


GBNF = 'root ::= "<" word ("," word)* ">"\nword ::= [a-c] [a-c]\n'
LARK = 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-c][a-c]/\n'
LIST = r"<[a-c]{2}(,[a-c]{2})*>"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutputs(regex=r"[a-f]{3}-\d{2}"), r"[a-f]{3}-\d{2}"),
        (StructuredOutputs(choice=["red", "green", "gr"]), "red|green|gr"),
        (StructuredOutputs(grammar=LARK), LIST), (StructuredOutputs(grammar=GBNF), LIST),
    ],
)  # fmt: skip
def test_regex_choice_and_grammars(model: LoadedModel, form: StructuredOutputs, pattern: str) -> None:
    """Sampled four at a time, greedily, and by beams: each text matches in full and ends by itself."""
    llm = llm_on(model)
    bias = {byte_ids(model, ">")[0]: 12.0}
    options: dict[str, Any] = {"max_tokens": 80, "structured_outputs": form, "logit_bias": bias}
    for params in (
        SamplingParams(n=4, seed=3, **options), SamplingParams(temperature=0, **options),
        SamplingParams(temperature=0, beam_width=2, n=2, **options),
    ):  # fmt: skip
        (output,) = llm.generate([70, 71], params, use_tqdm=False)
        for sequence in output.outputs:
            assert sequence.finish_reason == "stop"
            assert re.fullmatch(pattern, sequence.text)
    idle(llm)


def test_free_and_structured_requests_share_steps(model: LoadedModel) -> None:
    """A free request beside structured ones says what it says alone, and any JSON object is an object."""
    llm = llm_on(model)
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = llm.generate([3, 4], free, use_tqdm=False)[0].outputs[0].token_ids
    params = SamplingParams(
        seed=1, max_tokens=200, structured_outputs=StructuredOutputs(json_object=True),
        logit_bias=closers(model),
    )  # fmt: skip
    outputs = llm.generate([[1], [3, 4], [2]], [params, free, params], use_tqdm=False)
    assert outputs[1].outputs[0].token_ids == alone
    for output in (outputs[0], outputs[2]):
        assert output.outputs[0].finish_reason == "stop"
        assert isinstance(json.loads(output.outputs[0].text), dict)


def test_a_dead_end_ends_that_request_alone(model: LoadedModel) -> None:
    """A form that bad_words rule out fails its request with a typed error; the other is served. min_tokens
    yields where the form is complete."""
    llm = llm_on(model)
    form = StructuredOutputs(choice=["ab"])
    blocked = SamplingParams(structured_outputs=form, bad_words=["b"], max_tokens=9)
    fine = SamplingParams(structured_outputs=form, min_tokens=5, max_tokens=9)
    with pytest.raises(GenerationFailed, match="no token could be sampled") as caught:
        llm.generate([[1], [2]], [blocked, fine], use_tqdm=False)
    assert isinstance(caught.value.__cause__, NoTokenAllowed)
    assert caught.value.outputs[0] is None
    assert caught.value.outputs[1].outputs[0].text == "ab"  # type: ignore[union-attr]
    idle(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one"), ({"regex": "a", "json": {}}, "exactly one"), ({"json": "{"}, "not JSON"),
        ({"json": [1]}, "must be a JSON schema"), ({"choice": []}, "must be 1..4096"),
        ({"choice": [""]}, "empty"),
        ({"regex": 5}, "must be a string"), ({"json": {"const": float("nan")}}, "not JSON"),
        ({"grammar": "x" * 200_001}, "200001 characters"),
    ],
)  # fmt: skip
def test_bad_forms_are_named(options: dict[str, Any], message: str) -> None:
    """Each refusal names the field."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        StructuredOutputs(**options)
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "options", [{"regex": "a(b"}, {"grammar": "start: nothing"}, {"grammar": "root ::= ("}]
)
def test_broken_forms_are_refused(model: LoadedModel, options: dict[str, Any]) -> None:
    """With what the library says of them."""
    params = SamplingParams(structured_outputs=StructuredOutputs(**options))
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        llm_on(model).generate([1], params, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True)


@pytest.mark.model
def test_default_model_follows_a_schema(smollm2: LoadedModel) -> None:
    """smollm2 with its own vocabulary: valid JSON from tokens of several characters."""
    schema = {
        "type": "object", "required": ["name", "born", "tags"], "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "maxLength": 20}, "born": {"type": "string", "format": "date"},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        },
    }  # fmt: skip
    llm = llm_on(smollm2, num_blocks=64)
    params = SamplingParams(n=2, seed=2, max_tokens=160, structured_outputs=StructuredOutputs(json=schema))
    prompt = "Describe a person as JSON with name, born and tags:\n"
    for sequence in llm.generate(prompt, params, use_tqdm=False)[0].outputs:
        assert sequence.finish_reason == "stop"
        valid(schema, sequence.text)

"""The list of sentences agrees with the model, and the tests that it names are there."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def run_model() -> ModuleType:
    """The program that runs the model; it is no module of a package."""
    spec = importlib.util.spec_from_file_location("run_model", HERE / "run_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_model"] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


def test_given_the_list_then_every_switch_of_the_model_is_in_it(run_model: ModuleType) -> None:
    listed = run_model.read(run_model.SENTENCES)
    model = run_model.MODEL.read_text("utf-8")

    counts = [len(list(run_model.plan(listed, model, tier))) for tier in run_model.TIERS]

    assert 50 < counts[0] < counts[1] < counts[2]
    with pytest.raises(run_model.Broken, match="M_UNHEARD_OF"):
        list(run_model.plan(listed, model + "\n#ifdef M_UNHEARD_OF\n#endif\n", "quick"))


def test_given_a_sentence_without_mutant_then_it_says_why_and_names_tests_that_exist(
    run_model: ModuleType,
) -> None:
    sentences = run_model.read(run_model.SENTENCES)["sentence"]
    ids = [each["id"] for each in sentences]
    assert len(ids) == len(set(ids))

    without = [each for each in sentences if "none" in each]

    assert len(without) >= 15
    for each in without:
        named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", each["none"])
        assert named, each["id"]
        for path, test in named:
            text = (ROOT / path).read_text("utf-8")
            assert re.search(rf"^(async )?def {test}\(", text, re.M), f"{path}::{test}"

"""`torch.compile` on the two halves of a model changes no label and no certificate."""

from __future__ import annotations

import shutil

import digits_vit
import pytest
import torch

from patchcure import Defense

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "gcc", "cc")), reason="torch.compile needs a C++ compiler"
)


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_compiled_halves_answer_the_same() -> None:
    images, labels = (part[:8] for part in digits_vit.digits("test"))
    defense = Defense(digits_vit.split_vit(digits_vit.network(), digits_vit.WINDOW, 2), digits_vit.THREAT)
    expected = defense.predict(images), defense.certify(images, labels)
    defense.model.features = torch.compile(defense.model.features)  # type: ignore[method-assign]
    defense.model.logits = torch.compile(defense.model.logits)  # type: ignore[method-assign]
    prediction, certificate = defense.predict(images), defense.certify(images, labels)
    assert torch.equal(prediction.labels, expected[0].labels)
    assert torch.equal(prediction.votes, expected[0].votes)
    assert torch.equal(certificate.certified, expected[1].certified)
    assert torch.equal(certificate.strict, expected[1].strict)

"""Two models train with planner as with torch's own operators, and save no more for their gradients."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch  # noqa: E402

from planner.bench.training import CONTEXTS, MODELS, train  # noqa: E402

# As users compile, but without a C++ compiler.
TRIED = {**CONTEXTS, "compiled": lambda model: torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")}


@pytest.mark.parametrize("context", TRIED)
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_torch(name, context):
    torch.compiler.reset()
    trained = train(name, TRIED[context], 3)
    ours, peer = trained["planner"], trained["torch"]
    assert len(ours.losses) == 3
    assert ours.losses[0] != ours.losses[-1]
    assert ours.losses == pytest.approx(peer.losses, rel=1e-2 if context == "autocast" else 1e-5)
    assert 0 < ours.saved_bytes <= peer.saved_bytes

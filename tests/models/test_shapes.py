"""The shapes that can be benchmarked have the published sizes, and their graphs build and fuse."""

import sys
from math import prod
from pathlib import Path

import pytest
import torch

from nibblelm.graph import fused
from nibblelm.models import tensor_plan
from nibblelm.shapes import SHAPES

sys.path.insert(0, str(Path(__file__).parent))
from test_fusion import ShapesOnly, step_of

# Billions of parameters, as published with the models; of gemma3-12b without its vision part.
PARAMETERS = {
    "llama-3-70b": 70.55, "llama-3-8b": 8.03, "llama-3.2-1b": 1.24, "tinyllama-1.1b": 1.10, "qwen2.5-0.5b": 0.494,
    "gpt-neox-6.9b": 6.86, "gemma2-9b": 9.24, "qwen3-8b": 8.19, "mistral-7b": 7.25, "glm4-9b": 9.40,
    "gemma3-12b": 11.77, "phi3-mini": 3.82, "falcon-7b": 6.92, "bloom-7b": 7.07, "stablelm-12b": 12.14,
    "cohere-35b": 34.98,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_the_published_ones(name: str) -> None:
    count = sum(prod(spec.shape) for spec in tensor_plan(SHAPES[name], strict=True))
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=0.006)


@pytest.mark.parametrize("name", SHAPES)
def test_the_graph_of_a_step_builds(name: str) -> None:
    """Of two layers, whose weights have shapes and no data."""
    layers = "n_layer" if "n_layer" in SHAPES[name] else "num_hidden_layers"
    graph = step_of({**SHAPES[name], layers: 2}, ShapesOnly())
    assert graph.output.width == SHAPES[name]["vocab_size"]
    assert graph.output.dtype == torch.float32
    assert sum(node.op == "attention" for node in graph.nodes) == 2
    assert len(fused(graph).nodes) < len(graph.nodes)

"""Every family at 1B has about llama's weights, and the head size it is published with."""

import pytest


def test_sizes() -> None:
    import bench_cpu_families as bench

    from nibblelm.models import family
    from nibblelm.shapes import SHAPES

    assert {SHAPES[name]["model_type"] for name in bench.SIZES} >= {raw["model_type"] for raw in SHAPES.values()} - {
        "llama",
        "qwen2",
    }
    for name in bench.SIZES:
        small = bench.smaller(name)
        assert bench.matrices(small) == pytest.approx(bench.matrices(SHAPES[bench.LLAMA]), rel=0.04)
        configs = [family(raw).read_config(raw) for raw in (small, SHAPES[name])]
        assert configs[0].head_dim == configs[1].head_dim

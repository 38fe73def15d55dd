# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks as modules, for tests of what in them is not the measuring itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load_benchmark(name: str) -> Any:
    """Return a benchmark, imported: they are scripts, and no package has them."""
    full_name = f"benchmark_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up while they are made.
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]

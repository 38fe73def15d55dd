# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the command line: ``python -m lightning_resilience``."""

from __future__ import annotations

from lightning_resilience.cli.main import app


if __name__ == "__main__":
    app(prog_name="lightning-resilience")

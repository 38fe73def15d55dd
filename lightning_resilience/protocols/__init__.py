# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Loops and order, as generators that ask for effects and do no I/O."""

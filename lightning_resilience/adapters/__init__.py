# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One foreign library per file: types, exceptions and names are translated, nothing decided."""

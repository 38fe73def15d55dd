# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every decision of this package, as pure functions: time and chance are handed in."""

# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The Trainer's side: hooks of Lightning, in either of its two distributions."""

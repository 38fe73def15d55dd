# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Tests: a package, so that processes which tests start can import what they are sent."""

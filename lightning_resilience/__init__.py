# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps training alive through outages of what a job shares, without making the outage worse."""

# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The shipped protocols in a virtual world: clocks, stores, storage and faults that a seed decides.

Nothing here is a second implementation of anything: the simulator drives the same generators as the
blocking driver, on one virtual clock, and looks at what reaches the store and the storage.
"""

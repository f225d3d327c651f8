# SPDX-License-Identifier: Apache-2.0
"""Deliberate defects, each with the tests that must fail by it.

patches    the defects; README.md says how to add one
catalogue  patches as they are read
scratch    a copy of the tree, to which one patch at a time is applied
suites     builds the copy, and runs tests in it
campaign   the tests without a patch, then with each
"""

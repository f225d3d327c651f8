# SPDX-License-Identifier: Apache-2.0
"""``backsightctl``: ask a coordinator, or the node on this machine (``python3 -m ctl``)."""

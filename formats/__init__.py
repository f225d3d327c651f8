# SPDX-License-Identifier: Apache-2.0
"""Every format of traces: as they are recorded, as spans, and as other tools want them."""

# SPDX-License-Identifier: Apache-2.0
"""``backsight-probes``: loads the probes of ``bpf/`` and has them fire into processes' trigger queues."""

# SPDX-License-Identifier: Apache-2.0
"""The probes on kernels that this machine does not run: ``make test-kernels``."""

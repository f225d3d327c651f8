# SPDX-License-Identifier: Apache-2.0
"""The configuration files of both daemons, which ``backsightctl`` checks as well."""

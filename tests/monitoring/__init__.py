# SPDX-License-Identifier: Apache-2.0
"""What an operator watches the daemons with: rules, dashboard, and the guide."""

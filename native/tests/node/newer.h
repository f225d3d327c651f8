/* SPDX-License-Identifier: Apache-2.0 */
/* Before everything else (-include): ABI 3 has come, and ABI 2 is spoken still. */
#ifndef BS_TEST_NEWER_H
#define BS_TEST_NEWER_H

#include "abi/types.h"

#undef BS_ABI_VERSION
#define BS_ABI_VERSION 3u

#endif

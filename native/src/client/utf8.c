/* SPDX-License-Identifier: Apache-2.0 */
#include "client.h"

size_t bs_utf8_cut(const char *text, size_t bytes, size_t max)
{
	if (bytes <= max)
		return bytes;
	/* Back to where a sequence starts; not forever in what is no UTF-8. */
	for (size_t cut = max; cut > 0 && cut + 4 > max; cut--) {
		if (((unsigned char)text[cut] & 0xc0) != 0x80)
			return cut;
	}
	return max;
}

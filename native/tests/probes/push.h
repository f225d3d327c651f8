/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PUSH_H
#define PUSH_H

#define PUSH_AT_ONCE 32

struct push {
	unsigned long long producer;
	unsigned long long next; /* the number of its next trigger */
};

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* A fake node for a program in C++, which cannot read abi.h. */
#ifndef BS_CPP_NODE_H
#define BS_CPP_NODE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

void cpp_node_open(void);
void cpp_node_close(void);
/* Records of the next handle, which must be whole and of that trace. */
int cpp_node_records(uint64_t hi, uint64_t lo);

#ifdef __cplusplus
}
#endif
#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* What numbers of the kernel mean: system calls, and why packets are dropped. */
#include <bpf/btf.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

int fill_syscalls(const struct bsp *p)
{
	int fd = map_fd(p, "syscalls");

	for (uint32_t i = 0; i < PROBES_SYSCALLS; i++) {
		int err =
			bpf_map_update_elem(fd, &i, &syscall_table[i], BPF_ANY);

		if (err)
			return err;
	}
	return 0;
}

#define REASON_PREFIX "SKB_DROP_REASON_"

/* What is freed without a loss: where nobody says more; what came once already; what a
 * connection that is closed had not read, or what closes it, which has a probe. */
static const char *const no_losses[] = {
	"NOT_SPECIFIED",    "TCP_OLD_DATA", "TCP_OFOMERGE",
	"TCP_OLD_SEQUENCE", "TCP_OLD_ACK",  "TCP_RFC7323_PAWS_ACK",
	"QUEUE_PURGE",	    "TCP_CLOSE",    "TCP_RESET",
};

static bool is_loss(const char *reason)
{
	for (size_t i = 0; i < sizeof(no_losses) / sizeof(no_losses[0]); i++) {
		if (!strcmp(reason, no_losses[i]))
			return false;
	}
	return true;
}

/* By name: the numbers are others in each version of Linux. */
int fill_reasons(const struct bsp *p, const struct btf *kernel)
{
	const struct btf_type *type;
	int fd = map_fd(p, "reasons");
	int id, err = 0;

	id = btf__find_by_name_kind(kernel, "skb_drop_reason", BTF_KIND_ENUM);
	type = id < 0 ? NULL : btf__type_by_id(kernel, (uint32_t)id);
	for (uint32_t i = 0; type && i < btf_vlen(type) && !err; i++) {
		const struct btf_enum *one = &btf_enum(type)[i];
		const char *name = btf__name_by_offset(kernel, one->name_off);
		char reason[BS_KERNEL_NAME_BYTES] = "";
		uint32_t number = (uint32_t)one->val;

		if (!name ||
		    strncmp(name, REASON_PREFIX, strlen(REASON_PREFIX)) != 0)
			continue;
		name += strlen(REASON_PREFIX);
		if (!is_loss(name) || number >= PROBES_REASONS)
			continue;
		snprintf(reason, sizeof(reason), "%s", name);
		err = bpf_map_update_elem(fd, &number, reason, BPF_ANY);
	}
	return err;
}

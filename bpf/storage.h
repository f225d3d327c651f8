/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What is known of a thread, and of a socket: kept with it by the kernel, which frees it
 * with it. Programs that bcc compiles cannot have that; there it is found by the thread's
 * number, or the socket's address, and forgotten when either ends.
 */
#ifndef BPF_STORAGE_H
#define BPF_STORAGE_H

#include "maps.h"

/* (A file that uses neither gives bcc no layout of it.) */
struct sock;
struct task_struct;

#ifndef PROBES_BY_BCC

static __always_inline struct probes_thread *thread_of(struct task_struct *task)
{
	return bpf_task_storage_get(&threads, task, 0, 0);
}

/* NULL: no memory. */
static __always_inline struct probes_thread *
thread_make(struct task_struct *task)
{
	return bpf_task_storage_get(&threads, task, 0,
				    BPF_LOCAL_STORAGE_GET_F_CREATE);
}

/* before: the number that it had until now. */
static __always_inline void thread_forget(struct task_struct *task, int before)
{
	bpf_task_storage_delete(&threads, task);
}

static __always_inline struct socket *socket_of(struct sock *sk)
{
	return bpf_sk_storage_get(&sockets, sk, 0, 0);
}

static __always_inline struct socket *socket_make(struct sock *sk)
{
	return bpf_sk_storage_get(&sockets, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
}

static __always_inline void socket_forget(struct sock *sk)
{
}

#else

static __always_inline struct probes_thread *thread_of(struct task_struct *task)
{
	__u32 pid = FIELD(task, pid);

	return bpf_map_lookup_elem(MAP(threads_by_pid), &pid);
}

static __always_inline struct probes_thread *
thread_make(struct task_struct *task)
{
	const struct probes_thread blank = {};
	__u32 pid = FIELD(task, pid);

	bpf_map_update_elem(MAP(threads_by_pid), &pid, &blank, BPF_ANY);
	return bpf_map_lookup_elem(MAP(threads_by_pid), &pid);
}

static __always_inline void thread_forget(struct task_struct *task, int before)
{
	__u32 pid = FIELD(task, pid), pid_before = before;

	bpf_map_delete_elem(MAP(threads_by_pid), &pid);
	if (pid_before != pid)
		bpf_map_delete_elem(MAP(threads_by_pid), &pid_before);
}

static __always_inline struct socket *socket_of(struct sock *sk)
{
	__u64 address = (__u64)sk;

	return bpf_map_lookup_elem(MAP(sockets_by_address), &address);
}

static __always_inline struct socket *socket_make(struct sock *sk)
{
	__u64 address = (__u64)sk;
	const struct socket *blank;

	if (socket_of(sk))
		return socket_of(sk);
	blank = only(MAP(blank_socket));
	if (!blank)
		return 0;
	bpf_map_update_elem(MAP(sockets_by_address), &address, blank,
			    BPF_NOEXIST);
	return socket_of(sk);
}

static __always_inline void socket_forget(struct sock *sk)
{
	__u64 address = (__u64)sk;

	bpf_map_delete_elem(MAP(sockets_by_address), &address);
}

#endif

#endif

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Maps are made by the control plane (tailbound.kernel.maps, from the schema) and referred to by name.
 * Under BCC TB_FD_name is a placeholder number, under clang a relocation; the loader fills in the file
 * descriptor in both, so that a compiled object is not bound to one process.
 *
 * Numbers that no loop depends on are relocations, too, so that one object does for every port and every size of ring.
 * Under BCC, which has no relocations, they are macros. In a process maps are memory (host_lib/core/user.h).
 */
#ifndef TB_MAPS_H
#define TB_MAPS_H

#include "compat.h"

#ifndef TB_USER
#ifdef TB_BCC
#define TB_MAP(name) ((void *)bpf_pseudo_fd(1, TB_FD_##name))
#else
#define TB_MAP(name)                      \
	({                                \
		extern int tb_map_##name; \
		(void *)&tb_map_##name;   \
	})

/* What the compiler knows nothing of, and the verifier as a constant. */
#define TB_NUMBER(name)                                               \
	({                                                            \
		__u64 tb_number;                                      \
		asm("%0 = tb_number_" #name " ll" : "=r"(tb_number)); \
		(__u32) tb_number;                                    \
	})
#define TB_PORT TB_NUMBER(TB_PORT)
#define TB_RESULT_ROWS TB_NUMBER(TB_RESULT_ROWS)
#define TB_PORTS TB_NUMBER(TB_PORTS)
#define TB_SUM_ROWS TB_NUMBER(TB_SUM_ROWS)
#define TB_VLAN TB_NUMBER(TB_VLAN)

/* Objects that are built ahead name the sources that they are of (kernel/built.py). */
#ifdef TB_SIGNATURE
const char tb_signature[] SEC("tailbound") = TB_SIGNATURE;
#endif
#endif

#define TB_LOOKUP(name, index)                              \
	({                                                  \
		__u32 tb_key = (index);                     \
		bpf_map_lookup_elem(TB_MAP(name), &tb_key); \
	})
#endif

#endif /* TB_MAPS_H */

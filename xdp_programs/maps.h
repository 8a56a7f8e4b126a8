/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Maps are made by the control plane (tailbound.kernel.maps, from the schema) and referred to by name.
 * Under BCC TB_FD_name is a placeholder number, under clang a relocation; the loader fills in the file
 * descriptor in both, so that a compiled object is not bound to one process.
 */
#ifndef TB_MAPS_H
#define TB_MAPS_H

#include "compat.h"

#ifdef TB_BCC
#define TB_MAP(name) ((void *)bpf_pseudo_fd(1, TB_FD_##name))
#else
#define TB_MAP(name)                      \
	({                                \
		extern int tb_map_##name; \
		(void *)&tb_map_##name;   \
	})
#endif

#define TB_LOOKUP(name, index)                              \
	({                                                  \
		__u32 tb_key = (index);                     \
		bpf_map_lookup_elem(TB_MAP(name), &tb_key); \
	})

#endif /* TB_MAPS_H */

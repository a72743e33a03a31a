// A library to preload, by which a program finds a lesser CPU: without AMX and the 16-bit floats of AVX-512, with
// BENCH_CPU=avx512 also without VNNI and what came with it or later, with BENCH_CPU=avx2_vnni without AVX-512, and with
// BENCH_CPU=avx2 without AVX-512 and AVX-VNNI. Linux makes the instruction CPUID fault, if the CPU can ("cpuid_fault" in
// /proc/cpuinfo), and the handler carries it out and clears bits. Their numbers are those of Intel's Software
// Developer's Manual, volume 2A, CPUID, leaf 7. What was compiled for this CPU, or reads /proc/cpuinfo, notices nothing.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012 }; // asm/prctl.h

#define BIT(n) (1u << (n))
static const uint32_t AMX_AND_FP16_EDX = BIT(22) | BIT(23) | BIT(24) | BIT(25);
static const uint32_t BF16_AND_AMX_FP16_EAX = BIT(5) | BIT(21); // part 1
// F, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; 4VNNIW, 4FMAPS, VP2INTERSECT; and AVX-VNNI
static const uint32_t AVX512_EBX = BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31);
static const uint32_t AVX512_ECX = BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14);
static const uint32_t AVX512_EDX = BIT(2) | BIT(3) | BIT(8);
static const uint32_t IFMA_EBX = BIT(21);
static const uint32_t AVX_VNNI_EAX = BIT(4); // part 1

static int without_avx512, without_avx512_vnni, without_avx_vnni;

static void answer(int number, siginfo_t *info, void *context) {
  (void)info;
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const uint8_t *code = (const uint8_t *)registers[REG_RIP];
  if (code[0] != 0x0F || code[1] != 0xA2) { // not CPUID: the program's own fault, which comes again
    signal(number, SIG_DFL);
    return;
  }
  const uint32_t leaf = (uint32_t)registers[REG_RAX], part = (uint32_t)registers[REG_RCX];
  uint32_t a, b, c, d;
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
  __cpuid_count(leaf, part, a, b, c, d);
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
  if (leaf == 7 && part == 0) {
    d &= ~AMX_AND_FP16_EDX;
    if (without_avx512)
      b &= ~AVX512_EBX;
    if (without_avx512_vnni)
      b &= ~IFMA_EBX, c &= ~AVX512_ECX, d &= ~AVX512_EDX;
  } else if (leaf == 7 && part == 1) {
    a &= ~(BF16_AND_AMX_FP16_EAX | (without_avx_vnni ? AVX_VNNI_EAX : 0));
  } else if (leaf == 0x1D || leaf == 0x1E) { // tiles
    a = b = c = d = 0;
  }
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

static int is(const char *cpu, const char *which) { return cpu && !strcmp(cpu, which); }

__attribute__((constructor)) static void begin(void) {
  const char *cpu = getenv("BENCH_CPU");
  const int skylake = is(cpu, "avx512");
  without_avx_vnni = skylake || is(cpu, "avx2");
  without_avx512 = is(cpu, "avx2") || is(cpu, "avx2_vnni");
  without_avx512_vnni = without_avx512 || skylake;
  struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGSEGV, &action, NULL);
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
    perror("this CPU does not let CPUID fault");
    _exit(1);
  }
}

// A plugin of QEMU's that counts the instructions which an emulated process executes, in the first 8 bytes of the file
// that its argument `counter` names. QEMU's functions are declared here, as its documentation, "QEMU TCG Plugins", has
// them, since their header is seldom installed.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>

extern "C" {
struct qemu_plugin_tb; // a block of instructions that is translated as a whole
typedef uint64_t qemu_plugin_id_t;
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*translated)(qemu_plugin_id_t, qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(qemu_plugin_tb *, int operation, void *to, uint64_t value);
size_t qemu_plugin_tb_n_insns(const qemu_plugin_tb *);

extern const int qemu_plugin_version;
const int qemu_plugin_version = 1;
}

static constexpr int ADD = 0; // QEMU_PLUGIN_INLINE_ADD_U64
static void *counter;

static void count(qemu_plugin_id_t, qemu_plugin_tb *block) {
  qemu_plugin_register_vcpu_tb_exec_inline(block, ADD, counter, qemu_plugin_tb_n_insns(block));
}

extern "C" int qemu_plugin_install(qemu_plugin_id_t id, const void *, int argc, char **argv) {
  static const char NAME[] = "counter=";
  if (argc != 1 || strncmp(argv[0], NAME, strlen(NAME)))
    return 1;
  const int file = open(argv[0] + strlen(NAME), O_RDWR);
  counter = mmap(nullptr, sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (counter == MAP_FAILED)
    return 1;
  qemu_plugin_register_vcpu_tb_trans_cb(id, count);
  return 0;
}

// Calls a library of native kernels as its parent process asks: reads requests from standard input, each a letter and
// six int64, and answers on standard output. Addresses are those of this process.
//   a size            allocates zeros                          -> address
//   w address size    writes the bytes that follow             -> 0
//   r address size    reads                                    -> the bytes
//   f address         frees                                    -> 0
//   o p c u s m e     calls tenuto_open, _prepare, _copy, _memory (u), _step, _sample (m) or _close  -> result
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

static void *library;
template <class Result, class... Arguments> static Result call(const char *name, Arguments... arguments) {
  return ((Result (*)(Arguments...))dlsym(library, name))(arguments...);
}

int main(int, char **argv) {
  library = dlopen(argv[1], RTLD_NOW);
  if (!library)
    return fprintf(stderr, "%s\n", dlerror()), 1;
  struct {
    int64_t letter, given[6];
  } request;
  while (fread(&request, sizeof request, 1, stdin) == 1) {
    const int64_t *given = request.given;
    void *const first = (void *)given[0];
    int64_t result = 0;
    if (request.letter == 'a') {
      const size_t room = ((size_t)given[0] + 127) / 64 * 64;
      result = (int64_t)memset(aligned_alloc(64, room), 0, room);
    } else if (request.letter == 'w') {
      if (fread(first, 1, (size_t)given[1], stdin) != (size_t)given[1])
        return 1;
    } else if (request.letter == 'r') {
      fwrite(first, 1, (size_t)given[1], stdout);
      fflush(stdout);
      continue;
    } else if (request.letter == 'f') {
      free(first);
    } else if (request.letter == 'o') {
      result = (int64_t)call<void *>("tenuto_open", first, (void *)given[1], (int)given[2], (int)given[3]);
    } else if (request.letter == 'p') {
      result = call<int>("tenuto_prepare", first, (void *)given[1], (int)given[2], (int)given[3]);
    } else if (request.letter == 'c') {
      call<void>("tenuto_copy", first, (int)given[1], (int)given[2], (void *)given[3], (void *)given[4]);
    } else if (request.letter == 'u') {
      result = (int64_t)call<void *>("tenuto_memory", first, (int)given[1]);
    } else if (request.letter == 's') {
      result = call<int>("tenuto_step", first, (void *)given[1]);
    } else if (request.letter == 'm') {
      call<void>("tenuto_sample", first, (void *)given[1]);
    } else if (request.letter == 'e') {
      call<void>("tenuto_close", first);
    }
    fwrite(&result, sizeof result, 1, stdout);
    fflush(stdout);
  }
}

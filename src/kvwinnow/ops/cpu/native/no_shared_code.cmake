# Fails if an object that is compiled for one level holds what runs outside that level.
#
# A function template of the standard library, or an inline function with external linkage, is a weak symbol in every
# object that uses it. The linker keeps one of them, be it the one with AVX-512 in it, and all callers get that one.
# Constructors of static objects run when the library is loaded, on any machine.
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} --defined-only ${object} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed ERROR_QUIET)
  string(REGEX MATCHALL "[^\n]* ([WVu] |t _GLOBAL__sub_I)[^\n]*" found "${symbols}")
  if(NOT failed AND found)
    list(JOIN found "\n  " found)
    message(FATAL_ERROR "${object} holds what other levels may run:\n  ${found}\nPut it into an anonymous namespace "
      "inside KVW_NS, make it constexpr, or do without that part of the standard library (see levels.h).")
  endif()
endforeach()

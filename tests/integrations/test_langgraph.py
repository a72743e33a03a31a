"""LangGraph's graphs and checkpointers from the package index, with the chat model that has sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.server import Server

pytest.importorskip("langgraph", reason="langgraph is not installed; python -m bench.clients langgraph runs this")

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from tenuto.integrations.langgraph import TenutoChat, TenutoSaver, place_of


@pytest.fixture
def model(smollm2_server: Server) -> Iterator[TenutoChat]:
    model = TenutoChat(url=smollm2_server.url, options={"max_new_tokens": 16})
    with model.engine:
        before = model.engine.sessions()
        yield model
        assert model.engine.sessions() == before  # of other tests


def graph_of(model: Any, saver: TenutoSaver) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("answer", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_edge(START, "answer")
    return graph.compile(checkpointer=saver)


def thread(name: str, checkpoint: str | None = None) -> Any:
    place = {"thread_id": name, "checkpoint_ns": "", **({"checkpoint_id": checkpoint} if checkpoint else {})}
    return {"configurable": place}


def asked(graph: Any, text: str, config: Any) -> AIMessage:
    answer = graph.invoke({"messages": [HumanMessage(text)]}, config)["messages"][-1]
    assert isinstance(answer, AIMessage)
    return answer


def session_of(answer: AIMessage) -> str:
    place = place_of(answer)
    assert place is not None
    return str(place["session"])


def reused(answer: AIMessage) -> int:
    assert answer.usage_metadata is not None
    return answer.usage_metadata["input_token_details"]["cache_read"]


def tokens(answer: AIMessage) -> int:
    assert answer.usage_metadata is not None
    return answer.usage_metadata["total_tokens"]


def test_a_thread_goes_on_in_its_session_also_with_another_model_object(model: TenutoChat) -> None:
    saver = TenutoSaver(model)
    first = asked(graph_of(model, saver), "Name a fruit.", thread("talk"))
    again = TenutoChat(url=model.url, options={"max_new_tokens": 16})
    with again.engine:
        second = asked(graph_of(again, saver), "What colour is it?", thread("talk"))
    assert reused(second) >= tokens(first) - 1
    assert session_of(second) == session_of(first)
    saver.delete_thread("talk")


def test_going_on_from_an_earlier_checkpoint_forks_its_session_and_keeps_the_later_answers(model: TenutoChat) -> None:
    saver = TenutoSaver(model)
    graph = graph_of(model, saver)
    first = asked(graph, "Name a fruit.", thread("talk"))
    earlier = graph.get_state(thread("talk")).config["configurable"]["checkpoint_id"]
    second = asked(graph, "What colour is it?", thread("talk"))
    kept = model.engine.attach(session_of(second)).history
    other = asked(graph, "Where does it grow?", thread("talk", earlier))
    assert session_of(other) != session_of(second)
    assert reused(other) >= tokens(first) - 1
    assert model.engine.attach(session_of(second)).history == kept
    saver.delete_thread("talk")  # closes both


def test_a_copied_thread_and_its_source_do_not_see_each_other(model: TenutoChat) -> None:
    saver = TenutoSaver(model)
    graph = graph_of(model, saver)
    first = asked(graph, "Name a fruit.", thread("one"))
    graph.update_state(thread("two"), graph.get_state(thread("one")).values, as_node="answer")
    answers = [asked(graph, "What colour is it?", thread(name)) for name in ("one", "two")]
    assert answers[0].content == answers[1].content
    assert all(reused(answer) >= tokens(first) - 1 for answer in answers)
    assert len({session_of(answer) for answer in answers}) == 2
    saver.delete_thread("one")
    assert asked(graph, "Where does it grow?", thread("two")).content
    saver.delete_thread("two")


def test_a_stop_that_an_answer_lacks_is_not_in_its_session(model: TenutoChat) -> None:
    question, more = HumanMessage("Name a fruit."), HumanMessage("What colour is it?")
    whole = model.invoke([question])
    stopped = model.invoke([question], stop=[str(whole.content)[5:8]])
    assert stopped.content == str(whole.content)[:5]
    second = model.invoke([question, stopped, more])
    assert session_of(second) == session_of(stopped)
    bare = AIMessage(stopped.content)  # begins anew
    other = model.invoke([question, bare, more])
    assert model.engine.attach(session_of(second)).history == model.engine.attach(session_of(other)).history
    third = model.invoke([question, stopped, more, second, HumanMessage("Where does it grow?")])
    assert session_of(third) == session_of(second)
    assert reused(third) >= tokens(second) - 1
    for answer in (whole, second, other):
        model.engine.attach(session_of(answer)).close()


def test_an_edited_conversation_and_a_closed_session_begin_anew(model: TenutoChat) -> None:
    saver = TenutoSaver(model)
    graph = graph_of(model, saver)
    first = asked(graph, "Name a fruit.", thread("talk"))
    edited = first.model_copy(update={"content": "Plum."})
    graph.update_state(thread("talk"), {"messages": [edited]})
    second = asked(graph, "What colour is it?", thread("talk"))
    assert session_of(second) != session_of(first)
    model.engine.attach(session_of(second)).close()
    third = asked(graph, "Where does it grow?", thread("talk"))
    assert third.content
    for answer in (first, third):
        model.engine.attach(session_of(answer)).close()


def test_a_tool_is_called_and_its_result_is_the_next_turn(model: TenutoChat) -> None:
    def temperature(day: int) -> str:
        """The temperature of a day."""
        return f"{10 + day} degrees"

    def answer(state: MessagesState) -> Any:
        choice = "none" if len(state["messages"]) > 1 else "any"
        bound = model.bind_tools([temperature], tool_choice=choice, max_new_tokens=48, parallel_tool_calls=False)
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([temperature]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    saver = TenutoSaver(model)
    run = graph.compile(checkpointer=saver)
    _, call, result, final = run.invoke({"messages": [HumanMessage("How warm is day 3?")]}, thread("talk"))["messages"]
    assert call.tool_calls[0]["name"] == "temperature"
    assert "degrees" in result.content
    assert reused(final) >= call.usage_metadata["input_tokens"]
    pieces = list(model.stream([HumanMessage("Name a tea.")]))
    assert len(pieces) > 2
    model.engine.attach(session_of(pieces[-1])).close()
    saver.delete_thread("talk")
